"""What of a chat request goes through the checkpoint's template, by the real ``openai`` client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from tiny_models import make_tokenizer

TOKENIZER = make_tokenizer()
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TOOL_TURNS: list[ChatCompletionMessageParam] = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}],
    },
    {
        "role": "assistant",
        "content": None,
        "reasoning": "I look.",  # type: ignore[typeddict-unknown-key]
        "tool_calls": [
            {
                "id": "abc123def",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abc123def", "content": "rain"},
]
RENDERED = (
    "<|im_start|>user\nWeather?<|im_end|>\n"
    "<|im_start|>assistant\n<think>\nI look.\n</think>\n\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
)
ASKED = "<|im_start|>assistant\n"


def prompt(client: openai.OpenAI, messages: list[Any], **options: Any) -> str:
    """What the engine was given: the text of the prompt's token ids."""
    body = {"return_token_ids": True, **options.pop("extra_body", {})}
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=1, extra_body=body, **options
    )
    ids = answer.model_dump()["prompt_token_ids"]
    return str(TOKENIZER.decode(ids, skip_special_tokens=False))


def test_tools_calls_and_their_answers_reach_the_template(client: openai.OpenAI) -> None:
    seen = prompt(client, TOOL_TURNS, tools=[WEATHER])
    assert seen.startswith("<|im_start|>system\n# Tools\n<tools>\n{")
    assert '"name": "get_weather"' in seen
    assert seen.endswith(RENDERED + ASKED)


def test_variables_of_the_template_are_the_requests(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"chat_template_kwargs": {"enable_thinking": False}}
    assert prompt(client, messages, extra_body=body).endswith(ASKED + "<think>\n\n</think>\n\n")


def test_a_final_message_is_continued_or_no_turn_is_begun(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "One two"}]
    going_on = prompt(client, messages, extra_body={"continue_final_message": True})
    assert going_on.endswith(ASKED + "One two")
    closed = prompt(client, messages, extra_body={"add_generation_prompt": False})
    assert closed.endswith("One two<|im_end|>\n")


def test_a_role_that_the_template_does_not_know_is_the_systems(client: openai.OpenAI) -> None:
    messages = [{"role": "developer", "content": "Hi"}]
    assert prompt(client, messages).startswith("<|im_start|>system\nHi")


def test_tokenize_renders_the_same_prompt(http: httpx.Client) -> None:
    asked = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [WEATHER],
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": True,
    }
    ids = http.post("/tokenize", json=asked).json()["tokens"]
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert "get_weather" in text
    assert text.endswith("</think>\n\n")


def test_tokenize_takes_nulls_for_what_is_not_said(http: httpx.Client) -> None:
    """verifiers' ``tokenize_vllm`` has its tools in every body."""
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    plain = http.post("/tokenize", json=chat).json()
    empty = {"tools": None, "chat_template": None, "chat_template_kwargs": None,
             "add_generation_prompt": None, "return_token_strs": None, "prompt": None}  # fmt: skip
    for more in (empty, {"return_token_strs": False}):
        reply = http.post("/tokenize", json={"model": "tiny", **chat, **more})
        assert reply.status_code == 200, reply.text
        assert reply.json() == plain
    refused = http.post("/tokenize", json={**chat, "return_token_strs": True})
    assert (refused.status_code, "return_token_strs" in refused.text) == (400, True)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools\\[0\\] must be"),
    ({"tools": [{"type": "function", "function": {}}]}, "needs a name"),
    ({"tool_choice": "auto"}, "needs tools"),
    ({"chat_template": "x"}, "--chat-template"),
    ({"chat_template_kwargs": {"messages": []}}, "no variable named messages"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
    ({"chat_template_kwargs": {"enable_thinkin": {}}, "max_tokns": 4}, "max_tokens"),
]


@pytest.mark.parametrize(("extra", "words"), BAD)
def test_what_is_wrong_with_a_chat_is_a_bad_request(
    client: openai.OpenAI, extra: dict[str, Any], words: str
) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model="tiny", messages=messages, extra_body=extra)
