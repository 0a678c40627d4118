"""Formats, tools and thoughts that a model is held to, by the real ``openai`` client."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel
from tiny_models import make_tokenizer

from rollout.server.http.openai.grammars import after_thought
from rollout.server.http.parsers import REASONING_PARSERS

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}},
            "required": ["city"],
        },
    },
}
TIME: ChatCompletionToolParam = {"type": "function", "function": {"name": "get_time"}}
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}  # no thought comes first
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Size(BaseModel):
    unit: bool
    count: int


def test_a_pydantic_model_is_filled(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=HI, response_format=Size, seed=1, max_tokens=400, extra_body=PLAIN
    )
    message = answer.choices[0].message
    assert isinstance(message.parsed, Size)
    assert answer.choices[0].finish_reason == "stop"


def test_json_objects_and_structured_outputs_are_kept_to(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="Hi", seed=1, max_tokens=60, n=3,
        extra_body={"structured_outputs": {"regex": "[0-9]{4}"}},
    )  # fmt: skip
    assert all(re.fullmatch("[0-9]{4}", choice.text) for choice in answer.choices)
    chat = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=60, seed=3, temperature=0.01,
        response_format={"type": "json_object"}, extra_body=PLAIN,
    )  # fmt: skip
    assert (chat.choices[0].message.content or "").startswith("{")


THINKS = [
    ("<|im_start|>assistant\n", "<think>hm</think>\n\n1234", True),
    ("<|im_start|>assistant\n", "1234", True),
    ("<|im_start|>assistant\n", "hm</think>\n\n1234", False),
    ("assistant\n<think>\n", "hm</think>\n\n1234", True),
    ("assistant\n<think>\n", "hm</think>\n\nhm", False),
    ("<think>\n\n</think>\n\n", "1234", True),
    ("<think>\n\n</think>\n\n", "<think>hm</think>1234", False),
]


@pytest.mark.more
def test_a_grammar_holds_for_what_comes_after_a_thought() -> None:
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo.from_huggingface(make_tokenizer())
    compiler = xgrammar.GrammarCompiler(info)
    answers = (
        {"regex": "[0-9]{4}"},
        {"grammar": "root ::= [0-9] [0-9] [0-9] [0-9]"},
        {"choice": ["1234", "no"]},
        {"json": {"type": "integer"}},
    )
    for grammar in answers:
        for prompt, text, allowed in THINKS:
            made = after_thought(grammar, REASONING_PARSERS["qwen3"], prompt)
            if "structural_tag" in made:
                compiled = compiler.compile_structural_tag(json.dumps(made["structural_tag"]))
                assert xgrammar.GrammarMatcher(compiled).accept_string(text) is allowed
            else:
                assert made == grammar


def test_a_grammar_holds_for_the_final_channel_of_gpt_oss() -> None:
    xgrammar = pytest.importorskip("xgrammar")
    tokenizer = make_tokenizer()
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    made = after_thought({"json": {"type": "integer"}}, REASONING_PARSERS["openai_gptoss"], "Hi")
    tag = json.dumps(made["structural_tag"])
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(tag)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    for text, taken, complete in (
        (f"{thought}<|channel|>final<|message|>12", True, True),
        (f"{thought}<|channel|>final<|message|>no", False, False),
        ("12", True, False),
    ):
        matcher = xgrammar.GrammarMatcher(compiled)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert all(map(matcher.accept_token, ids)) is taken
        assert matcher.is_completed() is complete


def test_a_call_that_the_model_wrote_comes_as_one(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HI, "tools": [WEATHER], "max_tokens": 200}
    text = f"<think>hm</think>\n\nI look.\n{CALL}\n{CALL}"
    body = {"extra_body": {"structured_outputs": {"regex": _literally(text)}, **PLAIN}}
    answer = client.chat.completions.create(**asked, **body)
    choice = answer.choices[0]
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert message.content == "I look.\n"
    assert message.model_dump()["reasoning_content"] == "hm"
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert 4 < (details.reasoning_tokens or 0) < answer.usage.completion_tokens - 4
    assert message.tool_calls is not None
    functions = [call.function for call in message.tool_calls if call.type == "function"]
    assert [f.name for f in functions] == ["get_weather"] * 2
    assert [json.loads(f.arguments) for f in functions] == [{"city": "Rome"}] * 2
    assert len({call.id for call in message.tool_calls}) == 2

    with client.chat.completions.stream(**asked, **body) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert len(deltas) > 4
    assert final.finish_reason == "tool_calls"
    assert final.message.content == message.content
    assert final.message.tool_calls is not None
    assert [c.function.arguments for c in final.message.tool_calls] == [
        f.arguments for f in functions
    ]


@pytest.mark.more
def test_a_session_continues_the_exact_ids_of_an_answer_that_was_shown_as_calls(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "tools": [WEATHER], "max_tokens": 200, "seed": 3,
        "extra_headers": {"X-Session-ID": "calls"},
    }  # fmt: skip
    body = {**PLAIN, "return_token_ids": True}
    messages: list[Any] = [*HI]
    grammar = {"structured_outputs": {"regex": _literally(f"{CALL}\n{CALL}")}}
    first = client.chat.completions.create(
        **asked, messages=messages, extra_body={**body, **grammar}
    )
    shown = first.choices[0].message
    assert shown.content is None
    assert shown.tool_calls is not None
    messages.append(shown.model_dump(include={"role", "content", "tool_calls"}))
    for call in shown.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    second = client.chat.completions.create(
        **{**asked, "max_tokens": 5}, messages=messages, extra_body=body
    )
    began, went_on = (reply.choices[0].model_dump() for reply in (first, second))
    known = began["prompt_token_ids"] + began["token_ids"]
    assert went_on["prompt_token_ids"][: len(known)] == known
    held = http.get("/session", params={"session_id": "calls"}).json()
    whole = held["prompt_token_ids"] + held["token_ids"]
    assert whole == went_on["prompt_token_ids"] + went_on["token_ids"]
    sampled = [t for t, made in zip(held["token_ids"], held["mask"], strict=True) if made]
    assert sampled == began["token_ids"] + went_on["token_ids"]


def test_a_call_can_be_required_and_a_tool_named(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": HI, "tools": [WEATHER, TIME], "max_tokens": 300, "seed": 2,
        "extra_body": PLAIN,
    }  # fmt: skip
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, parallel in (("required", False), (named, True)):
        chosen = {"tool_choice": choice, "parallel_tool_calls": parallel}
        with client.chat.completions.stream(**asked, **chosen) as events:
            events.until_done()
            [streamed] = events.get_final_completion().choices
        [found] = client.chat.completions.create(**asked, **chosen).choices
        assert streamed.message.tool_calls is not None
        assert streamed.message.tool_calls[0].function.arguments == (
            found.message.tool_calls[0].function.arguments
        )
        assert found.finish_reason == "tool_calls"
        assert not found.message.content
        [call] = found.message.tool_calls
        assert call.function.name in ("get_weather", "get_time")
        if call.function.name == "get_weather":
            assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "no type 'xml'"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "needs a schema"),
    ({"tools": [WEATHER], "tool_choice": "must"}, "none of none, auto and required"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "none of the tools",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "exclude each other",
    ),
    ({"structured_outputs": {"regex": "(a"}, **PLAIN}, "parenthesis is not closed"),
]


@pytest.mark.parametrize(("extra", "words"), BAD)
def test_what_is_no_format_is_a_bad_request(
    client: openai.OpenAI, extra: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model="tiny", messages=HI, extra_body=extra)


def _literally(text: str) -> str:
    return "".join(f"\\{c}" if c in r"\.[]{}()*+?|^$/" else c for c in text)
