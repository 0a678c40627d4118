"""Cumulative outputs by what each adds to the one before it: a stream of n tokens sends n."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rollout.errors import TransferFailed
from rollout.generation import Completion, Logprobs, RequestOutput, VersionSpan
from rollout.rpc import rollout_pb2 as pb

Spans = tuple[VersionSpan, ...]


def added(before: RequestOutput, now: RequestOutput) -> RequestOutput | None:
    """``now`` without what ``before`` has; None where it has what is not told by additions."""
    pairs = list(zip(before.outputs, now.outputs, strict=True))
    if _has_whole_parts(now) or not all(_has_grown(*pair) for pair in pairs):
        return None
    return RequestOutput(
        request_id="", prompt=None, prompt_token_ids=[], prompt_logprobs=None,
        outputs=[_rest(*pair) for pair in pairs], finished=now.finished,
        num_cached_tokens=now.num_cached_tokens, epoch=now.epoch,
    )  # fmt: skip


class GrownRows:
    """The columns of ``pb.Grown``: rows of one sample that have more tokens, and nothing else new.

    They are most of what a step of many streams says, and a message for each would cost much more
    to write and to read.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, str, float]] = []
        self._tokens: list[int] = []
        self._columns: tuple[list[float], ...] = ([], [], [])
        self.size = 0  # bytes, about

    def add(self, call: int, index: int, before: RequestOutput, now: RequestOutput) -> bool:
        """Whether ``now`` is such a row; then it is added."""
        if len(now.outputs) != 1 or not _goes_on(before, now):
            return False
        [old], [new] = before.outputs, now.outputs
        start, length = len(old.token_ids), len(old.text)
        tokens, logs = new.token_ids[start:], new.logprobs
        if not _only_grew(old, new, len(tokens)):
            return False
        self.rows.append((call, index, len(tokens), new.text[length:], new.cumulative_logprob))
        self._tokens += tokens
        for column, values in zip(self._columns, _columns(logs), strict=True):
            column += values[start:]
        self.size += 24 + 4 * (len(new.text) - length) + 16 * len(tokens)
        return True

    def message(self) -> Any:
        """None where there are none."""
        if not self.rows:
            return None
        calls, indices, counts, texts, sums = zip(*self.rows, strict=True)
        raw, processed, mass = self._columns
        return pb.Grown(
            calls=calls, indices=indices, counts=counts, texts=texts, cumulative_logprobs=sums,
            token_ids=self._tokens, raw=raw, processed=processed, log_kept_mass=mass,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class GrownRow:
    """What one of them has more."""

    text: str
    cumulative_logprob: float
    token_ids: list[int]
    columns: list[list[float]]


def grown_rows(message: Any) -> Iterator[tuple[int, int, GrownRow]]:
    """Call, index of the prompt in it and what is new; ``TransferFailed`` for columns that do not
    fit each other.
    """
    counts, tokens = message.counts, list(message.token_ids)
    columns = [list(part) for part in (message.raw, message.processed, message.log_kept_mass)]
    heads = (message.calls, message.indices, counts, message.texts, message.cumulative_logprobs)
    same = len({len(head) for head in heads}) == 1 and len({*map(len, (tokens, *columns))}) == 1
    if not same or sum(counts) != len(tokens):
        raise TransferFailed("columns of rows that have grown do not fit each other")
    at = 0
    for call, index, count, text, total in zip(*heads, strict=True):
        part = slice(at, at + count)
        yield call, index, GrownRow(text, total, tokens[part], [col[part] for col in columns])
        at += count


class Cumulative:
    """One row's outputs, of a whole one and what ``added`` or ``GrownRows`` told of those that
    followed.
    """

    def __init__(self, first: RequestOutput) -> None:
        self._first, self._newest = first, first
        self._samples = [_Sample(completion) for completion in first.outputs]

    def add(self, more: RequestOutput) -> None:
        self._newest = more
        for sample, completion in zip(self._samples, more.outputs, strict=True):
            sample.add(completion)

    def grow(self, more: GrownRow) -> None:
        if len(self._samples) != 1:
            raise TransferFailed("a row of several samples has grown as if it had one")
        self._samples[0].grow(more)

    def output(self) -> RequestOutput:
        """As it stands now; its lists belong to the caller."""
        first, newest = self._first, self._newest
        return RequestOutput(  # ``replace`` takes several times as long
            request_id=first.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids[:],
            prompt_logprobs=first.prompt_logprobs,
            outputs=[sample.completion() for sample in self._samples],
            finished=newest.finished,
            num_cached_tokens=newest.num_cached_tokens,
            epoch=newest.epoch,
            hidden_state=first.hidden_state,
            scores=first.scores,
            sparse_layers=first.sparse_layers,
            labels=first.labels,
        )


class _Sample:
    def __init__(self, first: Completion) -> None:
        self._newest, self._text, self._tokens = first, first.text, first.token_ids[:]
        self._columns = tuple(column[:] for column in _columns(first.logprobs))
        self._has_top = first.logprobs.top is not None
        self._sum = first.cumulative_logprob
        self._versions, self._kv = first.weight_versions, first.kv_spans

    def add(self, more: Completion) -> None:
        self._newest = more
        self._text += more.text
        self._tokens += more.token_ids
        for column, new in zip(self._columns, _columns(more.logprobs), strict=True):
            column += new
        self._sum = more.cumulative_logprob
        self._versions, self._kv = more.weight_versions, more.kv_spans

    def grow(self, more: GrownRow) -> None:
        if self._has_top or not (self._versions and self._kv):
            raise TransferFailed("a row without spans, or with top logprobs, has only more tokens")
        count = len(more.token_ids)
        self._text += more.text
        self._tokens += more.token_ids
        for column, new in zip(self._columns, more.columns, strict=True):
            column += new
        self._sum = more.cumulative_logprob
        self._versions, self._kv = _longer(self._versions, count), _longer(self._kv, count)

    def completion(self) -> Completion:
        newest = self._newest
        return Completion(
            index=newest.index,
            text=self._text,
            token_ids=self._tokens[:],
            logprobs=Logprobs(*[column[:] for column in self._columns]),
            cumulative_logprob=self._sum,
            finish_reason=newest.finish_reason,
            stop_reason=newest.stop_reason,
            weight_versions=self._versions,
            kv_spans=self._kv,
            staleness=newest.staleness,
            routed_experts=newest.routed_experts,
            sampling_mask=newest.sampling_mask,
            adapter=newest.adapter,
        )


def _has_whole_parts(now: RequestOutput) -> bool:
    """Whether it has what is not told by additions."""
    whole = now.prompt_logprobs, now.scores, now.hidden_state, now.labels, now.sparse_layers or None
    return any(part is not None for part in whole)


def _has_grown(before: Completion, now: Completion) -> bool:
    return (
        now.routed_experts is None
        and now.sampling_mask is None
        and len(now.token_ids) >= len(before.token_ids)
        and now.text.startswith(before.text)
    )


def _goes_on(before: RequestOutput, now: RequestOutput) -> bool:
    """Whether all but the samples is as it was."""
    return (
        not now.finished
        and before.num_cached_tokens == now.num_cached_tokens
        and before.epoch == now.epoch
        and not _has_whole_parts(now)
    )


def _only_grew(before: Completion, now: Completion, count: int) -> bool:
    """Whether all that is new of a sample are ``count`` tokens, and that its last spans go on."""
    return (
        now.finish_reason is None
        and now.logprobs.top is None
        and before.staleness == now.staleness
        and before.adapter == now.adapter
        and _has_grown(before, now)
        and _is_longer(before.weight_versions, now.weight_versions, count)
        and _is_longer(before.kv_spans, now.kv_spans, count)
    )


def _is_longer(before: Spans, now: Spans, count: int) -> bool:
    """Whether ``now`` is ``_longer(before, count)``."""
    if not before or len(before) != len(now) or (len(now) > 1 and before[:-1] != now[:-1]):
        return False
    old, new = before[-1], now[-1]
    return new.version == old.version and new.start == old.start and new.stop == old.stop + count


def _longer(spans: Spans, count: int) -> Spans:
    last = spans[-1]
    return (*spans[:-1], VersionSpan(last.version, last.start, last.stop + count))


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
