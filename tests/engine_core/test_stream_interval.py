"""How often a stream tells what it has: at its first token, each interval, and its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engine_core.harness import Sink, Start, request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tokenizer

from rollout.engine.core import EngineCore
from rollout.engine.tokenizer import Detokenizer, Tokenizer
from rollout.errors import EngineError, InvalidRequest
from rollout.generation import RequestOutput, SamplingParams

TOKENIZER = Tokenizer(make_tokenizer(320))
LENGTH = 40


def streamed(core: EngineCore, **params: Any) -> list[RequestOutput]:
    sink = Sink()
    core.submit([request(max_tokens=LENGTH, ignore_eos=True, **params)], sink, stream=True)
    sink.results()
    return [item for item in sink.items if isinstance(item, RequestOutput)]


def counts(outputs: list[RequestOutput]) -> list[int]:
    return [len(output.outputs[0].token_ids) for output in outputs]


def test_a_stream_tells_its_first_token_then_each_interval_and_its_end(start: Start) -> None:
    core = start(tokenizer=True)
    each = streamed(core, logprobs=2)
    assert counts(each) == list(range(1, LENGTH + 1))
    for interval in (2, 7, LENGTH - 1, LENGTH, 1 << 62):
        some = streamed(core, logprobs=2, stream_interval=interval)
        assert counts(some) == [*range(1, LENGTH, interval), LENGTH]
        for output in some[:-1]:  # with all that a stream of every token has then
            [got], [want] = output.outputs, each[len(output.outputs[0].token_ids) - 1].outputs
            assert got == want
    # Of the last one the text is made of all tokens, as of a call that is not streamed.
    whole = run(core, request(max_tokens=LENGTH, ignore_eos=True, logprobs=2, stream_interval=7))
    assert some[-1].outputs == whole["a"].outputs
    assert some[-1].outputs[0].text == each[-1].outputs[0].text


def test_a_stop_string_is_found_across_an_interval(start: Start) -> None:
    core = start(tokenizer=True)
    whole = streamed(core)[-1].outputs[0].text
    for at in range(8, 14):
        params = {"stop": (whole[at : at + 3],)}
        expected = streamed(core, **params)
        for interval in (2, 5, 64):
            got = streamed(core, **params, stream_interval=interval)
            assert got[-1].outputs == expected[-1].outputs
            assert got[-1].outputs[0].finish_reason == "stop"
            texts = {len(o.outputs[0].token_ids): o.outputs[0].text for o in expected}
            for output in got:
                assert output.outputs[0].text == texts[len(output.outputs[0].token_ids)]


def test_samples_of_one_prompt_are_told_together_and_each_at_its_end(start: Start) -> None:
    core = start()
    each = streamed(core, n=3, seed=5, stop_token_ids=tuple(range(7)))
    some = streamed(core, n=3, seed=5, stop_token_ids=tuple(range(7)), stream_interval=16)
    last = [replace(output, num_cached_tokens=0) for output in (each[-1], some[-1])]
    assert last[0] == last[1]  # but for what of the prompt was in the cache
    assert len(some) <= 3 + 3 * -(-LENGTH // 16)
    ends = [sum(c.finish_reason is not None for c in output.outputs) for output in some]
    assert ends == sorted(ends)
    assert ends[-1] == 3


def test_a_stream_whose_text_cannot_be_made_ends_its_call_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start(tokenizer=True)
    feed = Detokenizer.feed

    def fails(self: Detokenizer, token_ids: Any, *, final: bool = False) -> None:
        if self._params.seed == 1 and len(token_ids) > 1:
            raise RuntimeError("the tokenizer is at fault")
        feed(self, token_ids, final=final)

    monkeypatch.setattr(Detokenizer, "feed", fails)
    other, bad = Sink(), Sink(2)
    core.submit([request("b", max_tokens=LENGTH, seed=2)], other, stream=True)
    calls = [request(name, max_tokens=LENGTH, seed=1, stream_interval=8) for name in ("c", "d")]
    core.submit(calls, bad, stream=True)
    with pytest.raises(EngineError, match="the tokenizer is at fault"):
        bad.results()
    assert isinstance(bad.items[-1], EngineError)  # nothing comes behind it
    assert other.results()["b"].finished
    assert run(core, request(max_tokens=4))["a"].finished


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 319), max_size=60), st.integers(1, 9))
def test_tokens_that_come_together_show_what_they_would_one_by_one(
    ids: list[int], count: int
) -> None:
    """Also pieces of characters that never become whole, and special tokens."""
    one, many = (Detokenizer(TOKENIZER, [72, 105], SamplingParams()) for _ in range(2))
    for at in range(0, len(ids), count):
        for token in ids[at : at + count]:
            one.feed((token,))
        many.feed(ids[at : at + count])
        assert one.text == many.text
    one.feed((), final=True)
    many.make(ids)
    assert one.text == many.text


def test_an_interval_is_a_whole_number_from_1_on() -> None:
    for bad in (0, -1, 1.5, None, True, 1 << 63):
        with pytest.raises(InvalidRequest, match=r"stream_interval must be (at least 1|an int)"):
            SamplingParams.from_dict({"stream_interval": bad})
