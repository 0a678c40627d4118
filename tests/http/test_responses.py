"""``client.responses`` of the real ``openai`` client: text, calls, thoughts and streams."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome"]}}},
    "strict": True,
}


def test_a_response_is_the_text_of_the_chat(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="tiny", input="Hi", instructions="Be short.", max_output_tokens=12,
        extra_body={"seed": 1, "ignore_eos": True},
    )  # fmt: skip
    chat = client.chat.completions.create(
        model="tiny", max_tokens=12, seed=1, extra_body={"ignore_eos": True},
        messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
    )  # fmt: skip
    assert made.output_text == chat.choices[0].message.content
    assert (made.status, made.object) == ("incomplete", "response")
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.usage is not None
    assert made.usage.output_tokens == 12


def test_a_stream_adds_up_to_the_response(client: openai.OpenAI) -> None:
    text = "<think>hm</think>\n\nIt rains."
    asked: Any = {
        "model": "tiny", "input": [{"role": "user", "content": "Hi"}],
        "extra_body": {"structured_outputs": {"regex": text.replace(".", "\\.")}, **PLAIN},
    }  # fmt: skip
    whole = client.responses.create(**asked)
    assert whole.status == "completed"
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output_text == "It rains."
    assert whole.usage is not None
    used = whole.usage
    assert 4 < used.output_tokens_details.reasoning_tokens <= used.output_tokens - 4
    with client.responses.stream(**asked) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert len(deltas) > 2
    assert "".join(deltas) == final.output_text == whole.output_text
    assert [item.type for item in final.output] == ["reasoning", "message"]


def test_calls_and_their_answers_are_items(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "tools": [TOOL], "extra_body": {"seed": 1, **PLAIN}}
    first = client.responses.create(
        **asked, input="Weather?", tool_choice={"type": "function", "name": "get_weather"}
    )
    [call] = first.output
    assert call.type == "function_call"
    json.loads(call.arguments)
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    history = [{"role": "user", "content": "Weather?"}, call.model_dump(), answer]
    with client.responses.stream(
        **asked, input=history, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        stream.until_done()
        [again] = stream.get_final_response().output
    assert again.type == "function_call"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": 3}, "input must be a text"),
    ({"input": "a", "previous_response_id": "x"}, "no response is stored"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools are functions"),
    ({"input": "a", "temprature": 1}, "did you mean 'temperature'"),
    ({"input": "a", "n": 2}, "n must be 1"),
    ({"input": "a", "text": "x"}, "text must be an object"),
    ({"input": "a", "text": {"format": "json"}}, "text.format must be an object"),
    ({"input": "a", "reasoning": "low"}, "reasoning must be an object"),
    ({"input": "a", "tools": 5}, "tools must be a list"),
    (
        {
            "input": "a",
            "tool_choice": "required",
            "tools": [{"type": "function", "name": "f", "parameters": {"$defs": [1]}}],
        },
        "defs of its parameters must be an object",
    ),
    (
        {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        "a response has no logprobs",
    ),
    ({"input": "a", "logprobs": True}, "a response has no logprobs"),
    ({"input": "a", "top_logprobs": 2}, "a response has no top_logprobs"),
    ({"input": "a", "prompt_logprobs": 0}, "a response has no prompt_logprobs"),
    ({"input": "a", "return_token_ids": True}, "a response has no token_ids"),
    ({"input": "a", "return_sampling_mask": True}, "a response has no sampling_mask"),
]


@pytest.mark.parametrize(("body", "words"), BAD)
def test_what_is_no_text_is_a_bad_request(
    client: openai.OpenAI, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.post("/responses", cast_to=object, body={"model": "tiny", **body})
