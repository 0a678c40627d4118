"""Samples under way for Tinker's clients, which begin them with one request and ask with another.

What has ended is kept for a while, so that a lost reply can be asked for again, and so is which
weights made its tokens. Used in one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.api import AsyncRollout
from rollout.errors import EngineOverloaded, RequestError, RolloutError
from rollout.generation import Completion, RequestOutput, SamplingParams, VersionSpan

KEPT_RESULTS = 4096  # samples that have ended; the oldest go first
KEPT_BYTES = 256 << 20  # of them all
KEPT_SECONDS = 3600.0  # of one that nobody has asked for
ASKED_SECONDS = 120.0  # of one that was told: its reply may be lost
KEPT_VERSIONS = 1 << 16  # sequences whose spans are known
MOST = 16384  # samples under way
EMPTY = -99999.0  # the logprob of a cell of a top-k matrix that holds nothing
_REASONS = {"stop": 0, "length": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What of a sample goes into its answer; ``last``: how many of the prompt's logprobs."""

    params: SamplingParams
    prompt_logprobs: bool
    last: int | None
    processed: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """``category``: whose doing it was, "user" or "server"."""

    message: str
    category: str


class SampleFutures:
    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[bytes | Failed]] = {}
        self._done = KeptResults()
        self._versions: OrderedDict[str, tuple[int, tuple[VersionSpan, ...]]] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._done

    async def begin(
        self, rollout: AsyncRollout, request_id: str, prompt: Sequence[int], wanted: Wanted
    ) -> list[str]:
        """Ids of its sequences; raises ``EngineOverloaded`` where too many are under way."""
        ids = [f"{request_id}:{index}" for index in range(wanted.params.n)]
        if request_id not in self:
            if len(self._running) >= MOST:
                raise EngineOverloaded(f"{MOST} samples are under way: try again later")
            work = self._sample(rollout, ids, prompt, wanted)
            task = self._running[request_id] = asyncio.create_task(work)
            task.add_done_callback(lambda task: self._ended(request_id, task))
        return ids

    async def wait(self, request_id: str, timeout: float) -> bytes | Failed | None:
        """What has come of it; None where nothing has within ``timeout`` seconds."""
        task = self._running.get(request_id)
        if task is not None:
            await asyncio.wait((task,), timeout=timeout)
            await asyncio.sleep(0)  # its callback runs
        return self._done.ask(request_id)

    def cancel(self, request_id: str) -> bool:
        task = self._running.get(request_id)
        return task is not None and task.cancel()

    def versions(self, sequence_id: str) -> tuple[int, tuple[VersionSpan, ...]] | None:
        """(epoch, spans over its tokens) of a sequence that has ended."""
        return self._versions.get(sequence_id)

    async def _sample(
        self, rollout: AsyncRollout, ids: Sequence[str], prompt: Sequence[int], wanted: Wanted
    ) -> bytes | Failed:
        try:
            output = (await rollout.generate([list(prompt)], wanted.params))[0]
        except RolloutError as error:
            user = isinstance(error, RequestError) and not isinstance(error, EngineOverloaded)
            return Failed(str(error), "user" if user else "server")
        for completion in output.outputs:
            if completion.finish_reason not in _REASONS:  # a trainer must not take it for a sample
                why = completion.stop_reason or completion.finish_reason
                return Failed(f"sample {completion.index} was ended early: {why}", "server")
            self._versions[ids[completion.index]] = (output.epoch, completion.weight_versions)
        _trim(self._versions, KEPT_VERSIONS)
        return encode(output, wanted)

    def _ended(self, request_id: str, task: asyncio.Task[bytes | Failed]) -> None:
        self._running.pop(request_id, None)
        if task.cancelled():
            self._done.keep(request_id, Failed("it was cancelled", "user"))
        elif (error := task.exception()) is not None:
            self._done.keep(request_id, Failed(f"{type(error).__name__}: {error}", "server"))
        else:
            self._done.keep(request_id, task.result())


class KeptResults:
    """What samples came to, bounded in number, bytes and seconds; the oldest make room."""

    def __init__(
        self, *, most_bytes: int = KEPT_BYTES, asked_seconds: float = ASKED_SECONDS
    ) -> None:
        self._most_bytes, self._asked_seconds = most_bytes, asked_seconds
        self._held: OrderedDict[str, tuple[bytes | Failed, float]] = OrderedDict()  # and its end
        self._nbytes = 0

    def __contains__(self, request_id: str) -> bool:
        self._forget_old()
        return request_id in self._held

    def keep(self, request_id: str, result: bytes | Failed) -> None:
        self._forget_old()
        self._held[request_id] = result, time.monotonic() + KEPT_SECONDS
        self._nbytes += _size(result)
        while len(self._held) > 1 and (
            self._nbytes > self._most_bytes or len(self._held) > KEPT_RESULTS
        ):
            self._forget(next(iter(self._held)))

    def ask(self, request_id: str) -> bytes | Failed | None:
        """It, if it is here; from now on it stays for a shorter time."""
        result, end = self._held.get(request_id, (None, 0.0))
        if result is not None:
            self._held[request_id] = result, min(end, time.monotonic() + self._asked_seconds)
        return result

    def _forget_old(self) -> None:
        now = time.monotonic()
        for request_id in [name for name, (_, end) in self._held.items() if end <= now]:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._nbytes -= _size(self._held.pop(request_id)[0])


def _size(result: bytes | Failed) -> int:
    return len(result) if isinstance(result, bytes) else len(result.message)


def _trim(held: OrderedDict[str, Any], most: int) -> None:
    while len(held) > most:
        held.popitem(last=False)


# ---- Tinker's SampleResponse, field by field ----


def encode(output: RequestOutput, wanted: Wanted) -> bytes:
    """The protobuf message that the SDK parses; arrays are little-endian int32 and float32."""
    message = b"".join(_field(1, _sequence(c, wanted)) for c in output.outputs)
    rows = output.prompt_logprobs
    if rows is not None:
        first = 0 if wanted.last is None else len(rows) - wanted.last
        shown = [row if i >= first else None for i, row in enumerate(rows)]
        if wanted.prompt_logprobs:
            pairs = zip(shown, output.prompt_token_ids, strict=True)
            message += _field(2, _floats([np.nan if r is None else r[t] for r, t in pairs]))
        if wanted.params.prompt_logprobs:
            message += _field(3, _top(shown, wanted.params.prompt_logprobs))
    return message + _number(4, output.num_cached_tokens)


def _sequence(completion: Completion, wanted: Wanted) -> bytes:
    found = completion.logprobs
    values = found.processed if wanted.processed else found.raw
    message = _number(1, _REASONS[completion.finish_reason or ""])
    message += _field(2, np.asarray(completion.token_ids, "<i4").tobytes())
    message += _field(3, _floats(values))
    if wanted.params.logprobs and found.top:
        message += _field(4, _top(found.top, wanted.params.logprobs))
    return message


def _top(rows: Sequence[Mapping[int, float] | None], k: int) -> bytes:
    ids = np.zeros((len(rows), k), "<i4")
    values = np.full((len(rows), k), EMPTY, "<f4")
    for number, row in enumerate(rows):
        best = sorted((row or {}).items(), key=lambda item: -item[1])[:k]
        for rank, (token, value) in enumerate(best):
            ids[number, rank], values[number, rank] = token, value
    packed = _field(1, ids.tobytes()) + _field(2, values.tobytes())
    return packed + _number(3, k) + _number(4, len(rows))


def _floats(values: Sequence[float]) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def _field(number: int, payload: bytes) -> bytes:
    """Of wire type 2: its length, then its bytes."""
    return bytes(_varint(number << 3 | 2)) + bytes(_varint(len(payload))) + payload


def _number(number: int, value: int) -> bytes:
    return bytes(_varint(number << 3)) + bytes(_varint(value))


def _varint(value: int) -> Iterator[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value
