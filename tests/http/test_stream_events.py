"""Events that are made from the one before read as if each had been made by itself."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest

from rollout.generation import Completion, Logprobs, RequestOutput, VersionSpan
from rollout.server.http.openai.answers import AnswerStyle, Stream, answer
from rollout.server.http.openai.assistant import MessageReader
from rollout.server.http.parsers import REASONING_PARSERS

# What each token adds: quotes, what looks like a span's end, what is no ASCII, nothing, controls.
TEXTS = ["a", '"stop": -1}]', 'say ""', "é\u2028🙂", "", "\x7f\x00\n", " b", "c", "d", "e"]


def outputs() -> list[RequestOutput]:
    """Cumulative, of two samples: an update comes, both age, an adapter answers; they end."""
    made = []
    for count in range(1, len(TEXTS) + 1):
        spans = (VersionSpan(1, 0, min(count, 6)), *[VersionSpan(2, 6, count)] * (count > 6))
        samples = [
            Completion(
                index=index,
                text="".join(TEXTS[:count]),
                token_ids=list(range(count)),
                logprobs=Logprobs([-0.5] * count, [-0.25] * count, [0.0] * count),
                cumulative_logprob=-0.5 * count,
                finish_reason="length" if count == len(TEXTS) else None,
                stop_reason=None,
                weight_versions=spans,
                kv_spans=(VersionSpan(1, 0, count),),
                staleness=int(count > 7),
                adapter="b@2" if count > 8 else "",
            )
            for index in range(2)
        ]
        made.append(
            RequestOutput(
                request_id="r", prompt=None, prompt_token_ids=[1], prompt_logprobs=None,
                outputs=samples, finished=count == len(TEXTS), num_cached_tokens=0,
                epoch=7 + (count > 9),
            )
        )  # fmt: skip
    return made


def style(**more: object) -> AnswerStyle:
    given = {
        "model": 'm"stop": -1}]', "chat": False, "samples": 2, "logprobs": False, "top": 0,
        "processed": False, "token_ids": False, "token_text": str, "request_id": '"stop": -1',
        **more,
    }  # fmt: skip
    return AnswerStyle(**given, created=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("chat", [False, True])
def test_events_made_from_the_one_before_are_those_made_by_themselves(chat: bool) -> None:
    by_itself, stream = Stream(style(chat=chat)), Stream(style(chat=chat))
    by_itself._is_plain = False
    found = [event for output in outputs() for event in stream.events(0, output)]
    assert found == [event for output in outputs() for event in by_itself.events(0, output)]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in found]
    texts = [c["delta"].get("content", "") if chat else c["text"] for c in choices]
    assert len(found) == 2 * len(TEXTS)
    assert "".join(text for text, c in zip(texts, choices, strict=True) if c["index"]) == "".join(
        TEXTS
    )
    assert [c["epoch"] for c in choices] == [7] * 18 + [8] * 2
    assert choices[-1]["weight_versions"][-1] == {"version": 2, "start": 6, "stop": len(TEXTS)}


@pytest.mark.parametrize("chat", [False, True])
def test_a_choice_ends_once_while_others_go_on(chat: bool) -> None:
    stream, made = Stream(style(chat=chat)), outputs()
    third = replace(made[2].outputs[0], finish_reason="stop")
    for output in made[2:]:
        output.outputs[0] = third
    found = [
        json.loads(each.removeprefix("data: "))
        for output in made
        for each in stream.events(0, output)
    ]
    choices = [chunk["choices"][0] for chunk in found]
    reasons = [[c["finish_reason"] for c in choices if c["index"] == index] for index in range(2)]
    assert reasons == [[None, None, "stop"], [*[None] * (len(TEXTS) - 1), "length"]]


@pytest.mark.parametrize("echo", [(), ["x"], [[1]]])
def test_a_stream_decodes_each_token_as_often_as_the_whole_answer(echo: list[object]) -> None:
    decoded: list[int] = []

    def token_text(token: int) -> str:
        decoded.append(token)
        return "ab" * token

    asked = style(logprobs=True, echo=echo, token_text=token_text)
    whole = answer(outputs()[-1:], asked)["choices"]
    once, stream = Counter(decoded), Stream(asked)
    decoded.clear()
    events = [each for output in outputs() for each in stream.events(0, output)]
    assert Counter(decoded) == once
    choices = [json.loads(each.removeprefix("data: "))["choices"][0] for each in events]
    for index in range(2):
        found = [c["logprobs"]["text_offset"] for c in choices if c["index"] == index]
        assert list(chain(*found)) == whole[index]["logprobs"]["text_offset"]


def test_what_is_more_than_text_is_no_such_event() -> None:
    thinks = MessageReader(reasoning=REASONING_PARSERS["qwen3"])
    for more in ({"logprobs": True}, {"token_ids": True}, {"chat": True, "reader": thinks}):
        stream = Stream(style(**more))
        for output in outputs():
            stream.events(0, output)
        assert not stream._kept
