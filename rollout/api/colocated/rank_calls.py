"""Calls that all ranks of a trainer make together: the first one acts, and all hear how it went."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rollout.errors import (
    FORKED,
    EngineClosed,
    InvalidRequest,
    TransferFailed,
    WorkerDied,
    from_wire,
    to_wire,
)
from rollout.generation import RequestOutput
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.convert import output_from_proto, output_to_proto
from rollout.weight_sync.trainer.rank_group import RankGroup, typed
from rollout.wire.codec import from_plain, to_plain

T = TypeVar("T")


class RankCalls:
    """One rank's side of them, until ``close``. ``timeout``: seconds until all have come."""

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        self._ranks, self._timeout = tuple(ranks), timeout
        self._group: RankGroup | None = None
        self.is_closed, self._process = False, os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy in a forked process, whose parent goes on with the calls."""
        return os.getpid() != self._process

    def check_open(self) -> None:
        if self.is_closed:
            raise EngineClosed("this rollout was shut down; make a new one with Rollout.from_ranks")
        if self.is_forked:
            raise EngineClosed(FORKED)

    def agree(self, verb: str, said: Any) -> None:
        """All ranks are here, at the same call with the same arguments; else none goes on."""
        self.check_open()
        if len(self._ranks) == 1:
            return
        mark = hashlib.sha256(json.dumps([verb, said], default=repr).encode()).hexdigest()
        try:
            marks = self.group().exchange({"mark": mark}, self._timeout, verb)
        except TransferFailed as error:
            raise _gone(error) from error
        marks = [each["mark"] for each in marks]
        if odd := [r for r, m in zip(self._ranks, marks, strict=True) if m != marks[0]]:
            raise InvalidRequest(
                f"rank {', '.join(map(str, odd))} called {verb} with other arguments than rank "
                f"{self._ranks[0]}: every rank passes the same ones"
            )

    def all_succeed(
        self, verb: str, failure: Exception | None, said: Any = None, timeout: float | None = None
    ) -> list[Any]:
        """What all ranks have ``said``; where one has failed, that is raised on every rank."""
        if len(self._ranks) == 1:
            if failure is not None:
                raise failure
            return [said]
        try:
            group = self.group()
            where = f"trainer rank {group.ranks[group.rank]}: "
            told = None if failure is None else to_wire(typed(failure, where))
            found = group.exchange({"said": said, "failed": told}, timeout or self._timeout, verb)
        except TransferFailed as error:
            raise _gone(error) from error
        for each in found:
            if each["failed"] is not None:
                raise from_wire(each["failed"]) from failure
        return [each["said"] for each in found]

    def first_returns(self, verb: str, act: Callable[[], T], timeout: float, kind: type[T]) -> T:
        """What the first rank's ``act`` gave, of a ``kind`` that travels."""
        return self.first_does(
            verb, act, timeout, lambda value: {"value": to_plain(value)},
            lambda said: from_plain(kind, said["value"]),
        )  # fmt: skip

    def outputs(
        self, verb: str, act: Callable[[], list[RequestOutput]], timeout: float
    ) -> list[RequestOutput]:
        """The outputs that the first rank's ``act`` gave."""
        return self.first_does(verb, act, timeout, _outputs_to_wire, _outputs_from_wire)

    def first_does(
        self,
        verb: str,
        act: Callable[[], T],
        timeout: float,
        to_wire: Callable[[T], dict[str, Any]] = lambda _: {},
        from_wire: Callable[[dict[str, Any]], Any] = lambda _: None,
    ) -> T:
        """``act`` runs on the first rank; its outcome, which travels, on all of them."""
        group = self.group()
        try:
            done: T = group.first_does(act, timeout, verb, to_wire, from_wire)
            return done
        except TransferFailed as error:
            if not group.is_closed:
                raise  # what the first rank did has failed so
            raise _gone(error) from error

    def group(self, timeout: float | None = None) -> RankGroup:
        """The links between the ranks; formed anew where an error has closed them."""
        if self._group is None or self._group.is_closed:
            alone, timeout = len(self._ranks) == 1, timeout or self._timeout
            self._group = RankGroup() if alone else RankGroup.over(self._ranks, timeout)
        return self._group

    def close(self) -> None:
        self.is_closed = True
        if self._group is not None:
            self._group.close()


def _gone(error: TransferFailed) -> WorkerDied:
    """A rank that has left is the engine's failure: its ranks are these processes."""
    return WorkerDied(str(error))


def _outputs_to_wire(outputs: list[RequestOutput]) -> dict[str, Any]:
    found = [base64.b64encode(output_to_proto(o).SerializeToString()).decode() for o in outputs]
    return {"outputs": found}


def _outputs_from_wire(said: dict[str, Any]) -> list[RequestOutput]:
    found = [pb.RequestOutput.FromString(base64.b64decode(text)) for text in said["outputs"]]
    return [output_from_proto(message) for message in found]
