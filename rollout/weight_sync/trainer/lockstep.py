"""A source walked through by all of its ranks together: they go on, end or fail as one."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import zip_longest
from math import prod
from typing import Any

from rollout.errors import ConfigError, RolloutError, SourceFailed
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.base import Piece
from rollout.weight_sync.trainer.sources.detect import Detected
from rollout.weight_sync.trainer.sources.values import Incoming
from rollout.weight_sync.trainer.watchdog import Watchdog
from rollout.weights import TensorMeta


def agreed_source(
    found: Detected,
    info: WeightInfo,
    group: RankGroup,
    timeout: float,
    *,
    partial: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Incoming:
    """The source that all ranks have opened; collective, and raises the first error on all.

    ``settings``: of the call (JSON-able), without those that this rank leaves at their defaults.
    ``ConfigError`` names a rank that gives another value than the first, or other tensors.
    """
    source: Incoming | None = None
    failure: Exception | None = None
    metadata: tuple[TensorMeta, ...] | None = None
    try:
        source = found.read(info, group, partial=partial)
        metadata = source.metadata() if group.size > 1 else None
    except RolloutError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - the trainer's own code, or what it passed
        failure = source_failed(error, "")
    tensors = [[meta.name, str(meta.dtype), list(meta.shape)] for meta in metadata or ()]
    # What is merged is gathered beside the weights that are told.
    given = {**(settings or {}), "merged adapters": list(found.merged)}
    saying = {"settings": given, "tensors": digest_of(tensors)}
    said = group.vote(failure, timeout, "source", saying)
    assert source is not None
    _check_settings([one["settings"] for one in said], group.ranks)
    if len({one["tensors"] for one in said}) > 1:
        _name_difference(group.exchange({"tensors": tensors}, timeout, "tensors"), group.ranks)
    return source


def _check_settings(given: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    for rank, theirs in zip(ranks, given, strict=True):
        for name, value in theirs.items():
            if value != given[0].get(name, value):
                raise ConfigError(
                    f"trainer rank {rank} passes {name}={value!r}, rank {ranks[0]} "
                    f"{given[0][name]!r}: ranks that send one version together pass the same"
                )


def _name_difference(said: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    """Raise a ``ConfigError`` that names the first tensor of which ranks disagree."""
    firsts: list[list[Any]] = said[0]["tensors"]
    for rank, one in zip(ranks, said, strict=True):
        theirs: list[list[Any]] = one["tensors"]
        for mine, other in zip_longest(firsts, theirs):
            if mine != other:
                raise ConfigError(
                    f"trainer rank {rank} holds {_told(other)} where rank {ranks[0]} holds "
                    f"{_told(mine)}: ranks that send one version together pass the same model, "
                    "with the same tensors in the same order"
                )


def _told(tensor: Sequence[Any] | None) -> str:
    """A tensor as its name, dtype and shape, for a message."""
    if tensor is None:
        return "no further tensor"
    name, dtype, shape = tensor
    return f"{name} ({dtype.removeprefix('torch.')} {shape})"


def digest_of(obj: Any) -> str:
    """Of a JSON-able object; the same in every process."""
    return hashlib.sha256(json.dumps(obj, sort_keys=True).encode()).hexdigest()


class Walk:
    """One walk over a source's pieces; ``run`` is collective over its ranks.

    ``take`` gets every piece on every rank; what it raises ends no gather alone: nothing more is
    taken here, and the next vote hears of it, as of ``failed()``. There is a vote after every
    ``step_bytes`` of whole tensors, and ``after_vote`` is called when it has passed. ``seconds``
    counts the time in the source.
    """

    def __init__(
        self,
        pieces: Generator[Piece],
        group: RankGroup,
        watch: Watchdog,
        *,
        timeout: float,
        step_bytes: int,
        take: Callable[[Piece], None],
        failed: Callable[[], RolloutError | None] = lambda: None,
        after_vote: Callable[[], None] = lambda: None,
        phase: str = "gather",
    ) -> None:
        self._pieces, self._group, self._watch, self._phase = pieces, group, watch, phase
        self._timeout, self._step_bytes = timeout, step_bytes
        self._take, self._failed, self._after_vote = take, failed, after_vote
        self._error: RolloutError | None = None
        self._last = ""
        self.seconds = 0.0
        self.num_bytes = 0  # of the tensors that have passed

    def run(self, flush: Callable[[], None] = lambda: None) -> None:
        """To the source's end; then ``flush``, and a last vote."""
        voted = 0
        try:
            while True:
                piece, ended = self._next()
                if piece is None:
                    break
                self._last = piece.name
                self._hand_over(piece)
                if piece.last:
                    self.num_bytes += prod(piece.shape) * piece.values.dtype.itemsize
                    if self.num_bytes - voted >= self._step_bytes or self._fails_alone():
                        self._vote(self._failure(), "bucket")
                        voted = self.num_bytes
            self._vote(ended or self._failure(), f"end, after {self._last!r}")
            flush()
            self._group.vote(self._failure(), self._timeout, "last buckets")
        finally:
            self._pieces.close()

    def _next(self) -> tuple[Piece | None, RolloutError | None]:
        started = time.perf_counter()
        try:
            with self._watch.over(self._phase, self._last):
                return next(self._pieces, None), None
        except RolloutError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 - whatever the trainer's code raises
            return None, source_failed(error, self._last)
        finally:
            self.seconds += time.perf_counter() - started

    def _vote(self, failure: RolloutError | None, phase: str) -> None:
        self._group.vote(failure, self._timeout, phase)
        self._after_vote()

    def _fails_alone(self) -> bool:
        """Whether there is nobody to wait for."""
        return self._group.size == 1 and self._failure() is not None

    def _hand_over(self, piece: Piece) -> None:
        if self._error is not None:
            return
        try:
            self._take(piece)
        except RolloutError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - the trainer's code may run in here, too
            self._error = source_failed(error, piece.name)

    def _failure(self) -> RolloutError | None:
        return self._error or self._failed()


def source_failed(error: Exception, last: str) -> SourceFailed:
    """An exception of the trainer's own code, after tensor ``last``, as one of the tree."""
    after = f" after {last!r}" if last else ""
    failed = SourceFailed(f"the source raised{after}: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
