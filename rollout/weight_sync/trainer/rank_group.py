"""The trainer ranks that hold one source: they proceed together or fail together."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rollout import errors
from rollout.config import DEFAULT_TIMEOUT
from rollout.errors import ConfigError, SourceFailed, TransferFailed, some
from rollout.weight_sync.trainer.rank_rendezvous import meet, met_at
from rollout.weight_sync.trainer.star import Star

T = TypeVar("T")

GRACE = 0.5  # seconds that the centre still listens once it knows that the update failed


class RankGroup:
    """A star of sockets over the ranks of one source, for the length of one update.

    Member 0 (``is_sender``) decides and sends; every method is collective: all members call the
    same ones in the same order, with the same ``phase``. A star rather than a gloo group because
    the centre sees at once *which* peer closed, and tells the others at once, where gloo frees
    only a dead rank's neighbours before the timeout. Members meet through the job's own store
    (``RankGroup.over``); no listening socket outlives that meeting.

    Errors: ``TransferFailed`` (a peer died or is out of step), ``DeadlineExceeded`` (a peer is
    late); both name the ranks of the trainer's job and the phase. After an error the group is
    closed: the next update forms a fresh one.
    """

    def __init__(
        self, rank: int = 0, ranks: Sequence[int] = (0,), links: Mapping[int, Any] | None = None
    ) -> None:
        self.rank = rank  # index among the members
        self.ranks = tuple(ranks)  # of the members, in the trainer's job
        self._star = Star(self.ranks, links or {})
        self._lock = threading.Lock()  # the caller's own thread is in a call of this object
        self._given_up: errors.RolloutError | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def address(self) -> str:
        """The address of this machine that members on other hosts reach; loopback if none are."""
        return met_at(self._star.links.values())

    @property
    def is_closed(self) -> bool:
        """Whether its links are gone, after ``close`` or an error; an agreement of one has none."""
        return self.size > 1 and not self._star.links

    @property
    def is_sender(self) -> bool:
        return self.rank == 0

    @classmethod
    def over(cls, ranks: Sequence[int], timeout: float) -> RankGroup:
        """Connect to the other ``ranks`` of this ``torch.distributed`` job within ``timeout`` s."""
        here = dist.get_rank()
        if here not in ranks:
            raise ConfigError(
                f"rank {here} of the trainer's job does not hold this source, ranks "
                f"{some(list(map(str, ranks)))} do; only they may call update_weights with it"
            )
        me = list(ranks).index(here)
        if len(ranks) == 1:
            return cls(0, ranks)
        return cls(me, ranks, meet(me, tuple(ranks), timeout))

    def exchange(
        self,
        status: Mapping[str, Any],
        timeout: float,
        phase: str = "exchange",
        decided: bool = False,
    ) -> list[Any]:
        """Every member's ``status`` (a JSON-able object), in member order, on every member.

        Where one status has a true ``"error"``, members that do not come soon are None; so are, if
        what the sender says is ``decided``, those that are gone, late or elsewhere: it stands.
        """
        if self.size == 1:
            return [dict(status)]
        try:
            with self._lock:
                found = self._exchange(dict(status), timeout, phase, decided)
        except BaseException:
            self.close()
            raise
        if None in found:  # what they say next would be taken for another call's
            self.close()
        return found

    def _exchange(
        self, status: dict[str, Any], timeout: float, phase: str, decided: bool
    ) -> list[Any]:
        if self._given_up is not None:
            raise self._given_up
        if self.is_sender:
            return self._collect(status, time.monotonic() + timeout, phase, decided)
        with suppress(TransferFailed):  # the centre may have left after an earlier verdict
            self._star.send(0, {"phase": phase, "status": status}, timeout, phase)
        # The centre waits ``timeout`` for the slowest member, and then says who it was.
        reply = self._star.receive(0, timeout + min(1.0, timeout / 4), phase)[0]
        if reply.get("error"):
            raise errors.from_wire(reply["error"])
        found = list(reply["all"])
        if reply["phase"] != phase and "obj" in found[0]:  # it was decided without this member
            raise self._apart(self.rank, phase, reply["phase"])
        return found

    def broadcast(
        self,
        obj: Mapping[str, Any] | None,
        timeout: float,
        phase: str = "announce",
        decided: bool = False,
    ) -> dict[str, Any]:
        """Returns the sender's ``obj`` (JSON-able) on every member; what others pass is ignored."""
        mine = dict(obj or {}) if self.is_sender else {}
        said = self.exchange({"obj": mine}, timeout, phase, decided)
        return said[0]["obj"]  # type: ignore[no-any-return]

    def first_does(
        self,
        act: Callable[[], T],
        timeout: float,
        phase: str,
        to_wire: Callable[[T], dict[str, Any]],
        from_wire: Callable[[dict[str, Any]], T],
        lasting: bool = False,
    ) -> T:
        """What ``act`` returned on the first rank, as it travels to the others (JSON-able).

        Its error is raised on every rank. ``timeout`` bounds the first rank's own wait; the others
        allow for it to say so. ``lasting``: what it did cannot be undone, and is no failure where
        another rank is gone by then.
        """
        failure: errors.RolloutError | None = None
        said: dict[str, Any] = {}
        if self.is_sender:
            try:
                done = act()
                said = {"done": to_wire(done)} if self.size > 1 else {}
            except errors.RolloutError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - the other ranks wait to hear how it went
                failure = errors.from_wire(errors.to_wire(error))
                failure.__cause__ = error
        if self.size > 1:
            if failure is not None:
                said = {"error": errors.to_wire(failure)}
            said = self.broadcast(said, 2 * timeout, phase, lasting or failure is not None)
        if failure is not None:
            raise failure
        if self.is_sender:
            return done
        if "error" in said:
            raise errors.from_wire(said["error"])
        return from_wire(said["done"])

    def collect(
        self, rows: Sequence[Any], data: Tensor, timeout: float, phase: str,
        take: Callable[[list[Any], Tensor], None],
    ) -> None:  # fmt: skip
        """Have the sender ``take`` every member's ``rows`` (JSON-able) and bytes, in member order.

        The others take nothing: a vote before it says that all members have come this far.
        ``data``: uint8, in host memory.
        """
        with self._lock:
            if self._given_up is not None:
                raise self._given_up
            self._collected(rows, data, timeout, phase, take)

    def collect_rows(self, row: Mapping[str, Any], timeout: float, phase: str) -> list[Any]:
        """Every member's ``row`` (JSON-able) on the first rank, as ``collect``."""
        found: list[Any] = []
        nothing = torch.empty(0, dtype=torch.uint8)
        self.collect([row], nothing, timeout, phase, lambda rows, _: found.append(rows[0]))
        return found

    def _collected(
        self, rows: Sequence[Any], data: Tensor, timeout: float, phase: str,
        take: Callable[[list[Any], Tensor], None],
    ) -> None:  # fmt: skip
        if not self.is_sender:
            self._star.send(0, {"phase": phase, "rows": list(rows)}, timeout, phase, {"data": data})
            return
        take(list(rows), data)
        failure: errors.RolloutError | None = None
        for index in range(1, self.size):  # all of them, so that no frame is left for a later call
            try:
                theirs = self._rows_of(index, timeout, phase)
                if failure is None:
                    take(*theirs)
            except errors.RolloutError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _rows_of(self, index: int, timeout: float, phase: str) -> tuple[list[Any], Tensor]:
        header, tensors = self._star.receive(index, timeout, phase)
        if header.get("error"):
            raise errors.from_wire(header["error"])
        if header.get("phase") != phase or "data" not in tensors:
            raise self._apart(index, header.get("phase"), phase)
        return header["rows"], tensors["data"]

    def vote(
        self,
        error: BaseException | None,
        timeout: float,
        phase: str = "vote",
        saying: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Proceed only if no member has an ``error``; otherwise all raise the first one.

        The same class and message everywhere; ``__cause__`` is the original exception on the rank
        that raised it. One from outside the package's tree is the trainer's own: ``SourceFailed``.
        Returns what every member was ``saying`` (JSON-able), in member order.
        """
        if self.size == 1:
            if error is not None:
                raise typed(error, "") from _origin(error)
            return [dict(saying or {})]
        who = f"trainer rank {self.ranks[self.rank]}"
        mine = None if error is None else errors.to_wire(typed(error, f"{who}, {phase}: "))
        try:
            replies = self.exchange({**(saying or {}), "error": mine}, timeout, phase)
        except TransferFailed as lost:
            raise lost from error  # a gather that fails because a peer died names only a socket
        except errors.RolloutError:
            if error is None:
                raise
            # The others hang in the gather that failed here; the failure says more than that.
            raise typed(error, f"{who}, {phase}: ") from _origin(error)
        failed = [i for i, reply in enumerate(replies) if reply and reply["error"]]
        if not failed:
            return replies
        self.close()
        first = errors.from_wire(replies[failed[0]]["error"])
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt of this process stays one here
        raise first from (_origin(error) if failed[0] == self.rank and error else None)

    @contextmanager
    def step(self, phase: str, timeout: float = DEFAULT_TIMEOUT) -> Iterator[None]:
        """For a source's own ``__iter__``: what raises inside on one rank raises on all of them.

        Collective, as ``vote``: put in it what can fail before a collective, which all ranks then
        reach or none does.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the trainer's own code
            failure = error
        self.vote(failure, timeout, phase)

    def give_up(self, error: errors.RolloutError) -> None:
        """Tell the others of ``error`` while this member's own thread cannot be interrupted.

        All members raise it from the call that they are in, or from their next one. Called from a
        second thread; a call that the first thread is in ends by its own deadline.
        """
        if self._given_up is not None:
            return
        self._given_up = error
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._star.tell_all({"phase": "given up", "error": errors.to_wire(error)})
        finally:
            self._lock.release()

    def heard(self) -> errors.RolloutError | None:
        """On the sender: how a peer has failed meanwhile, if one has; never blocks for long.

        For a thread beside the one that makes all other calls, as ``give_up`` is.
        """
        if not self._lock.acquire(blocking=False):
            return None  # it will hear for itself
        try:
            return self._star.heard() if self.is_sender else None
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close every link, which frees peers that wait for this rank. Idempotent."""
        self._star.close()

    def _collect(
        self, mine: dict[str, Any], deadline: float, phase: str, decided: bool
    ) -> list[Any]:
        """The centre: take one status of every peer, answer all of them alike."""
        replies: dict[int, dict[str, Any] | None] = {0: mine}
        error: errors.RolloutError | None = None
        try:
            self._take_statuses(replies, deadline, phase, decided)
        except errors.RolloutError as failure:
            error = failure
        answer: dict[str, Any] = {"phase": phase, "all": [replies.get(i) for i in range(self.size)]}
        if error is not None:
            answer = {"phase": phase, "error": errors.to_wire(error)}
        for index in list(self._star.links):
            try:
                self._star.send(index, answer, 1.0, phase)
            except errors.RolloutError as failure:
                error = error or (None if decided else failure)
        if error is not None:
            raise error
        return answer["all"]  # type: ignore[no-any-return]

    def _take_statuses(
        self,
        replies: dict[int, dict[str, Any] | None],
        deadline: float,
        phase: str,
        decided: bool,
    ) -> None:
        """Into ``replies``, by member. Whose status is bad or late is an error; where all is
        ``decided`` it is None, or left out.
        """
        with selectors.DefaultSelector() as ready:
            for index, link in self._star.links.items():
                ready.register(link, selectors.EVENT_READ, index)
            while len(replies) < self.size:
                known = any(reply and reply.get("error") for reply in replies.values())
                if known:  # the verdict is clear: a peer may be stuck in the gather that failed
                    deadline = min(deadline, time.monotonic() + GRACE)
                come = list(self._star.early)
                if not come:
                    events = ready.select(max(0.0, deadline - time.monotonic()))
                    come = [key.data for key, _ in events]
                if not come and (known or decided):
                    return
                if not come:
                    raise self._star.late(set(range(self.size)) - set(replies), phase)
                for index in come:
                    try:
                        replies[index] = self._status(index, deadline, phase, known)
                    except errors.RolloutError:
                        if not decided:
                            raise
                        replies[index] = None
                    ready.unregister(self._star.links[index])

    def _status(self, index: int, deadline: float, phase: str, known: bool) -> dict[str, Any]:
        """What a peer has to say at ``phase``; ``TransferFailed`` when it is somewhere else.

        Once an update has failed (``known``, or by this status) its ranks may be anywhere.
        """
        frame = self._star.receive(index, deadline - time.monotonic(), phase)[0]
        if frame.get("error"):  # it gave up, wherever it is
            raise errors.from_wire(frame["error"])
        status = frame.get("status")
        there = frame.get("phase")
        if isinstance(status, dict) and (there == phase or known or status.get("error")):
            return status
        raise self._apart(index, there, phase)

    def _apart(self, index: int, there: Any, phase: Any) -> TransferFailed:
        return TransferFailed(
            f"trainer rank {self.ranks[index]} is at {there!r} while rank "
            f"{self.ranks[0]} is at {phase!r}: their sources are not in lockstep"
        )


def typed(error: BaseException, where: str) -> errors.RolloutError:
    """As all ranks raise it, behind ``where``; the trainer's own error is its source's failure."""
    if not isinstance(error, errors.RolloutError):
        return SourceFailed(f"{where}{type(error).__name__}: {error}")
    if not where:
        return error
    return errors.from_wire({"type": type(error).__name__, "message": f"{where}{error}"})


def _origin(error: BaseException) -> BaseException | None:
    """The exception to chain from: beneath our own wrapper, if that is what ``error`` is."""
    if isinstance(error, errors.RolloutError) and error.__cause__ is not None:
        return error.__cause__
    return error
