"""Cumulative outputs by what each adds to the one before it: a stream of n tokens sends n."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollout.generation import Completion, Logprobs, RequestOutput


def added(before: RequestOutput, now: RequestOutput) -> RequestOutput | None:
    """``now`` without what ``before`` has; None where it has what is not told by additions."""
    pairs = list(zip(before.outputs, now.outputs, strict=True))
    whole = now.prompt_logprobs, now.scores, now.hidden_state, now.labels, now.sparse_layers or None
    if any(part is not None for part in whole) or not all(_has_grown(*pair) for pair in pairs):
        return None
    return RequestOutput(
        request_id="", prompt=None, prompt_token_ids=[], prompt_logprobs=None,
        outputs=[_rest(*pair) for pair in pairs], finished=now.finished,
        num_cached_tokens=now.num_cached_tokens, epoch=now.epoch,
    )  # fmt: skip


class Cumulative:
    """One row's outputs, of a whole one and what ``added`` told of those that followed."""

    def __init__(self, first: RequestOutput) -> None:
        self._first, self._newest = first, first
        self._samples = [_Sample(completion) for completion in first.outputs]

    def add(self, more: RequestOutput) -> None:
        self._newest = more
        for sample, completion in zip(self._samples, more.outputs, strict=True):
            sample.add(completion)

    def output(self) -> RequestOutput:
        """As it stands now; its lists belong to the caller."""
        return replace(
            self._first,
            prompt_token_ids=self._first.prompt_token_ids[:],
            outputs=[sample.completion() for sample in self._samples],
            finished=self._newest.finished,
            num_cached_tokens=self._newest.num_cached_tokens,
            epoch=self._newest.epoch,
        )


class _Sample:
    def __init__(self, first: Completion) -> None:
        self._newest, self._text, self._tokens = first, first.text, first.token_ids[:]
        self._columns = tuple(column[:] for column in _columns(first.logprobs))

    def add(self, more: Completion) -> None:
        self._newest = more
        self._text += more.text
        self._tokens += more.token_ids
        for column, new in zip(self._columns, _columns(more.logprobs), strict=True):
            column += new

    def completion(self) -> Completion:
        logs = Logprobs(*(column[:] for column in self._columns))
        return replace(self._newest, text=self._text, token_ids=self._tokens[:], logprobs=logs)


def _has_grown(before: Completion, now: Completion) -> bool:
    return (
        now.routed_experts is None
        and now.sampling_mask is None
        and len(now.token_ids) >= len(before.token_ids)
        and now.text.startswith(before.text)
    )


def _rest(before: Completion, now: Completion) -> Completion:
    tokens, logs = len(before.token_ids), now.logprobs
    return replace(
        now,
        text=now.text[len(before.text) :],
        token_ids=now.token_ids[tokens:],
        logprobs=Logprobs(*(column[tokens:] for column in _columns(logs))),
    )


def _columns(logs: Logprobs) -> list[list[Any]]:
    found: list[list[Any]] = [logs.raw, logs.processed, logs.log_kept_mass]
    return found if logs.top is None else [*found, logs.top]
