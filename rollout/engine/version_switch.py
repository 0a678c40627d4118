"""What becomes of the requests that run, and of the caches, when a newer version goes live."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from rollout.engine.adapters.table import AdapterTable
from rollout.engine.pins import Pins, PinTerms
from rollout.engine.requests.output import OutputProcessor
from rollout.engine.requests.request_state import RequestState
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.sequences.sequence import Sequence, Status


class VersionSwitch:
    """In the engine's thread, inside a step boundary.

    ``max_staleness`` and ``on_stale``: the bound and the policy of requests that bring none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        pins: Pins,
        adapters: AdapterTable,
        max_staleness: int | None,
        on_stale: str,
    ) -> None:
        self._scheduler, self._outputs, self._pins = scheduler, outputs, pins
        self._adapters, self._stale = adapters, (max_staleness, on_stale)

    def to(
        self,
        version: int,
        in_flight: str,
        pin: PinTerms | None,
        *,
        models: bool,
        adapters: Collection[str],
        name: Callable[[], object],
    ) -> None:
        """``EngineCore.on_commit``; where it raises, names mean what they meant."""
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        if models:
            self._pins.end("at the next commit")  # which has waited for them, but for a bug
            self._pins.since = -1
        held = self._to_pin(in_flight) if models and pin is not None else []
        kept = {seq.seq_id for seq in held}
        if in_flight == "abort":  # what could fail comes first: then the version is as it was
            begun = [seq for seq in scheduler.begun() if seq.seq_id not in kept]
            if not models:
                begun = [s for s in begun if s.adapter is not None and s.adapter.name in adapters]
            self._outputs.abort({seq.request_id for seq in begun})
        with self._names_on_trial():
            name()
            self._follow_names(adapters, in_flight == "recompute", kept)
            if in_flight == "recompute" and models:
                scheduler.recompute(s for s in scheduler.sequences() if s.seq_id not in kept)
            again = self._outputs.end_stale(version, *self._stale, None if models else adapters)
        if not models:
            return
        gone = {seq.seq_id for seq in held if seq.status is Status.FINISHED}
        held = [seq for seq in held if seq.seq_id not in again | gone]
        if held and pin is not None:
            self._pins.begin(held, version, pin)
        elif pin is None and (asked := [s for s in scheduler.begun() if s.params.pin]):
            self._pins.refuse(asked, version, in_flight)
        blocks.set_version(version, pin=self._pins.version is not None)

    def judge(self, states: Iterable[RequestState]) -> None:
        """Of requests that other engines have begun: they may be older than is allowed."""
        begun = [state for state in states if state.request.delivered]
        if begun:
            self._outputs.end_stale_begun(begun, *self._stale)

    def _to_pin(self, in_flight: str) -> list[Sequence]:
        """What has begun, or of that the requests that ask for it, with all of their groups."""
        begun = self._scheduler.begun()
        groups = {seq.group for seq in begun if in_flight == "pin" or seq.params.pin}
        return [seq for seq in self._scheduler.sequences() if seq.group in groups]

    @contextmanager
    def _names_on_trial(self) -> Iterator[None]:
        """What raises within leaves names, and the adapters of sequences, as they were."""
        books, sequences = self._adapters.books(), self._scheduler.sequences()
        had = [(seq, seq.adapter) for seq in sequences if seq.adapter is not None]
        try:
            yield
        except BaseException:
            self._adapters.reset(books)
            for seq, adapter in had:
                seq.adapter = adapter
            raise

    def _follow_names(
        self, adapters: Collection[str], recompute: bool, kept: Collection[int]
    ) -> None:
        """Give the newest versions of ``adapters`` to what has not begun, and to what is computed
        again, which is by the live weights; not to those that are ``kept`` as they are, nor to the
        others that are pinned: they were never with those weights.
        """
        if not adapters:
            return
        begun = {seq.seq_id for seq in self._scheduler.begun()}
        moved = []
        for seq in self._scheduler.sequences():
            newest = None if seq.adapter is None else self._adapters.newest(seq.adapter.name)
            if seq.seq_id in kept:
                continue
            if newest is None or newest.name not in adapters or newest == seq.adapter:
                continue
            if recompute or (seq.seq_id not in begun and seq.pin is None):
                seq.adapter = newest
                moved.append(seq)
        self._scheduler.unpin(moved)
        self._scheduler.recompute([seq for seq in moved if seq.seq_id in begun])
