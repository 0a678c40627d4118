"""Which slot of the recurrent states belongs to which sequence, and which snapshots are kept.

A recurrent state has no positions: a prefix can be taken up only where a snapshot was made. One is
made where a block ends, at every so many blocks, at the last one within a prompt, and where a
prompt was seen to leave a known path (the scheduler ends a chunk there); it is found by the hash of
that block, as the block is, and what holds for blocks (one version, one ``CacheRoot``) holds for
it. The nearest at or below the known blocks is a hit.

Nor can a state go back behind a draft that was wrong: a step with drafts goes on from a copy, which
takes the place of the sequence's own where all of them were right, and else is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from rollout.engine.sequences.sequence import Sequence
from rollout.engine.sequences.snapshot import Snapshot
from rollout.engine.sequences.trial import Trial


class StateSlots:
    """Bookkeeping of ``num_running`` slots for sequences and ``num_snapshots`` behind them.

    Touches no tensor: what is to be copied stays with its sequence, as ``restoring`` and
    ``saving``, until a step of it is booked; one that was scheduled may go on without it.
    ``every``: blocks between the snapshots of a long sequence. The least recently used snapshot
    makes room for the next.
    """

    def __init__(self, num_running: int, num_snapshots: int, every: int) -> None:
        self.num_running, self.num_snapshots, self.every = num_running, num_snapshots, every
        self.hits = self.saved = self.evicted = 0
        self._free = list(range(num_running))[::-1]
        self._spare = list(range(num_running, num_running + num_snapshots))[::-1]
        self._found: OrderedDict[bytes, Snapshot] = OrderedDict()  # least recently used first

    @property
    def num_kept(self) -> int:
        """Snapshots that can be found."""
        return len(self._found)

    def stats(self) -> dict[str, int]:
        """By the names of ``EngineStats``."""
        return {
            "state_snapshots": self.num_kept,
            "state_snapshot_hits_total": self.hits,
            "state_snapshot_saves_total": self.saved,
            "state_snapshot_evictions_total": self.evicted,
        }

    def nearest(self, digests: list[bytes]) -> tuple[int, Snapshot | None]:
        """How many of a chain's blocks the last snapshot on it covers, and that snapshot."""
        for count in range(len(digests), 0, -1):
            if (snapshot := self._found.get(digests[count - 1])) is not None:
                return count, snapshot
        return 0, None

    def admit(self, seq: Sequence, found: Snapshot | None) -> None:
        """A slot for ``seq``, which goes on from ``found``, or from what it holds, or from zero."""
        seq.state_slot = self._free.pop()
        if found is not None:
            self.hits += 1
            self._found.move_to_end(found.digest)
            self.hold(seq, found)
        seq.restoring, seq.held_state = seq.held_state, None

    def hold(self, seq: Sequence, snapshot: Snapshot) -> None:
        """Keep ``snapshot`` for ``seq``, in place of what it held."""
        snapshot.holders += 1
        self.drop_hold(seq)
        seq.held_state = snapshot

    def drop_hold(self, seq: Sequence) -> None:
        held, seq.held_state = seq.held_state, None
        if held is not None:
            held.holders -= 1
            self._free_unheld(held)

    def plan(self, seq: Sequence) -> None:
        """Have the state of ``seq`` after its next step saved, if a slot can be had for it."""
        if seq.saving is not None:
            return  # the step that it was planned for went on without ``seq``
        own = seq.restoring
        if (slot := self._take_spare()) is not None:
            seq.saving = Snapshot(slot)
        elif own is not None and own.holders == 1:
            seq.saving = own  # the step reads it before it writes it
            if own.digest:
                self._evict(own)

    def drop_plan(self, seq: Sequence) -> None:
        """Nothing is saved of ``seq`` after its next step."""
        saving, seq.saving = seq.saving, None
        if saving is not None:
            self._free_unheld(saving)

    def book(self, seq: Sequence, digest: bytes, hold: bool) -> None:
        """A step of ``seq`` is over: it goes on from its own slot.

        What was planned is saved, after the block found by ``digest`` (empty: by nothing).
        ``hold``: keep it for ``seq``, too, which is to be forked there.
        """
        self._drop_restore(seq)
        snapshot, seq.saving = seq.saving, None
        if snapshot is None:
            return
        self.saved += 1
        if digest and digest not in self._found:
            snapshot.digest = digest
            self._found[digest] = snapshot
        if hold:
            self.hold(seq, snapshot)
        else:
            self._free_unheld(snapshot)

    def begin_trial(self, seq: Sequence, stop: int) -> bool:
        """Have the next step of ``seq``, up to ``stop``, go on from a copy of its state; False if
        there is no slot for one.
        """
        slot = self._take_spare()
        if slot is not None:
            seq.trial = Trial(slot, seq.num_computed, stop)
        return slot is not None

    def end_trial(self, seq: Sequence, keep: bool) -> None:
        """The copy is its state now, or is dropped."""
        trial, seq.trial = seq.trial, None
        if trial is not None:
            self._spare.append(seq.state_slot if keep else trial.slot)
            seq.state_slot = trial.slot if keep else seq.state_slot

    def release(self, seq: Sequence) -> None:
        """Take back the slots of ``seq``, what it holds, and what was to be copied for it."""
        self.end_trial(seq, keep=False)
        if seq.state_slot >= 0:
            self._free.append(seq.state_slot)
        seq.state_slot = -1
        self.drop_plan(seq)
        self._drop_restore(seq)
        self.drop_hold(seq)

    def forget(self, digest: bytes | None = None) -> None:
        """The snapshot of ``digest``, or none at all (None), is found again."""
        if digest is None:
            for snapshot in list(self._found.values()):
                self._unlink(snapshot)
        elif digest in self._found:
            self._unlink(self._found[digest])

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every slot is one sequence's, a snapshot's or free."""
        live = list(sequences)
        running = [seq.state_slot for seq in live if seq.state_slot >= 0]
        assert len(running + self._free) == self.num_running, "running slots"
        kept = {id(s): s for s in self._found.values()}
        for seq in live:
            used = (seq.held_state, seq.restoring, seq.saving)
            kept |= {id(s): s for s in used if s is not None}
        slots = [snapshot.slot for snapshot in kept.values()]
        slots += [seq.trial.slot for seq in live if seq.trial is not None]
        all_of_them = sorted(running + self._free + slots + self._spare)
        assert all_of_them == list(range(self.num_running + self.num_snapshots)), "slots"
        for snapshot in kept.values():
            holders = sum((s.held_state is snapshot) + (s.restoring is snapshot) for s in live)
            assert snapshot.holders == holders, f"{snapshot.slot}: wrong number of holders"

    def _drop_restore(self, seq: Sequence) -> None:
        restored, seq.restoring = seq.restoring, None
        if restored is not None:
            restored.holders -= 1
            if restored is not seq.saving:
                self._free_unheld(restored)

    def _take_spare(self) -> int | None:
        """A slot behind those of running sequences, the least recently used one's if need be."""
        if not self._spare:
            oldest = next((s for s in self._found.values() if not s.holders), None)
            if oldest is None:
                return None
            self._evict(oldest)
        return self._spare.pop()

    def _evict(self, snapshot: Snapshot) -> None:
        self.evicted += 1
        self._unlink(snapshot)

    def _unlink(self, snapshot: Snapshot) -> None:
        del self._found[snapshot.digest]
        snapshot.digest = b""
        self._free_unheld(snapshot)

    def _free_unheld(self, snapshot: Snapshot) -> None:
        if not snapshot.holders and not snapshot.digest:
            self._spare.append(snapshot.slot)
