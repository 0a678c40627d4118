"""Which tokens of which sequences are computed in the next step.

One token budget per step: decodes first, then prefill chunks, first come first served; drafts have
what is left, and give their blocks back where they were wrong. A sequence is admitted only when
there are free blocks for all its known tokens, so a prefill never stalls. If a decode finds no
block, the newest running sequence is preempted and recomputed later. Of sequences that share most
of a prompt one goes first; the others are admitted once its blocks are in the prefix cache. The
same calls on the same state give the same schedule.

    add -> [fresh] --admit--> running --finish--> gone
                                |  ^
                        preempt v  | admit
                              [started]  <-- samples 2..n, forked when the prompt is computed
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from rollout.engine.adapters.places import AdapterPlaces
from rollout.engine.scheduling.block_manager import BlockManager, PrefixHit
from rollout.engine.scheduling.drafter import Drafter
from rollout.engine.scheduling.in_flight_prefixes import InFlightPrefixes
from rollout.engine.sequences.sequence import ScheduledBatch, ScheduledEntry, Sequence, Status

_BY_ID = attrgetter("seq_id")
# Known tokens of a sequence in a step with drafts, where a recurrent state has gone back behind a
# wrong one. Any other has one: of more, as after a preemption, nobody has made the hidden states
# that a prediction head reads.
_MOST_BEHIND = 16


class Scheduler:
    """Orders sequences by ``seq_id``; owns their blocks through ``blocks``.

    ``frozen``: nothing is scheduled. ``admitting`` False: sequences that have not run yet stay in
    the queue, those that have run go on. ``places``: of adapters, where some wait in host memory.
    ``drafter``: guesses tokens after those that are known, while at most ``max_drafting`` sequences
    decode: more of them fill a step without.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        places: AdapterPlaces | None = None,
        drafter: Drafter | None = None,
        max_drafting: int = 0,
    ) -> None:
        self.blocks, self.places = blocks, places
        self.drafter, self._max_drafting = drafter, max_drafting
        self.frozen = False
        self.admitting = True
        self.pin: int | None = None  # the version that pinned sequences finish on
        self.running: list[Sequence] = []  # ascending seq_id
        self.preemptions = 0
        self._number = 0
        self._max_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._lanes = {False: _Lane(), True: _Lane()}  # of live weights; of pinned sequences
        self._turn = False  # whose step was the last
        self._refused: tuple[Sequence | None, int] = None, 0  # for want of blocks, and those free
        self._unforked: dict[int, list[Sequence]] = {}  # first sample's seq_id -> the others
        self._waiting: dict[int, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def drained(self) -> bool:
        """Whether everything that has begun is finished."""
        return not self.running and not any(_top(lane.started) for lane in self._lanes.values())

    def sequences(self) -> Iterator[Sequence]:
        """All live sequences, the running ones first."""
        yield from self.running
        yield from self._waiting.values()

    def add(self, samples: list[Sequence]) -> None:
        """Queue all samples of one request; the others wait until the first has the prompt.

        Where its group is pinned, it joins it.
        """
        first, *others = samples
        self._join_group(samples)
        heapq.heappush(self._lane_of(first).fresh, (first.seq_id, first))
        for seq in samples:
            self._waiting[seq.seq_id] = seq
        if others:
            self._unforked[first.seq_id], first.forks = others, True

    def schedule(self) -> ScheduledBatch:
        """The next step's work, with its blocks reserved; empty if nothing can run.

        While sequences are pinned, they and the others take turns.
        """
        self._number += 1
        batch = ScheduledBatch(version=self.blocks.version, number=self._number)
        if self.frozen:
            return batch
        for pinned in (False,) if self.pin is None else (not self._turn, self._turn):
            batch.version = self.blocks.version if self.pin is None or not pinned else self.pin
            before = self.preemptions
            budget = self._schedule_running(batch.entries, pinned)
            if self.preemptions == before:
                budget = self._admit(batch.entries, budget, pinned)
            if self.drafter is not None:
                self._draft(self.drafter, batch, budget)
            if batch.entries:
                self._turn = pinned
                break
        return batch

    def schedule_ahead(self, last: ScheduledBatch) -> ScheduledBatch:
        """The step after ``last``, which is still running; empty: wait for ``last`` first.

        Possible only if the tokens of ``last`` decide nothing but which sequences end: every
        running sequence samples in it, none is drafted for or pinned, none waits that could be
        admitted now or after the ends that ``last`` is sure to bring, and there are free blocks. A
        sequence that turns out to have ended is computed once in vain; one that waits for its place
        comes a step later.
        """
        batch = ScheduledBatch(
            version=self.blocks.version, number=last.number + 1, previous_rows=[]
        )
        rows = last.rows_running
        waits = self._next_heap(False)
        held = self.frozen or self.pin is not None or self._drafts_for(len(rows))
        if held or len(rows) < len(self.running) or (waits and not self._is_full(waits)):
            return batch
        going_on = []
        for row in rows:
            entry = last.entries[row]
            seq = entry.sequence
            if seq.reads_tokens or seq.seq_id in self._unforked or not entry.draws_alone:
                return batch
            if self.blocks.next_snapshot(seq, coming=entry.num_new) == entry.stop + 1:
                return batch  # what a step saves is booked before the next
            if seq.num_tokens + 1 < seq.max_len:
                going_on.append((row, seq))
            elif waits:
                return batch  # its place is taken in the next step
        if all(self.blocks.grow(seq, coming=1) for _, seq in going_on):
            batch.entries = [ScheduledEntry(seq, 1) for _, seq in going_on]
            batch.previous_rows = [row for row, _ in going_on]
            self._number = batch.number
        return batch

    def advance(self, batch: ScheduledBatch) -> None:
        """Account for a computed step, before its sampled tokens are appended."""
        size, slides = self.blocks.block_size, self.blocks.slides
        for entry in batch.entries:
            seq = entry.sequence
            seq.advance(entry.num_new, batch.version)
            if seq.trial is None and seq.num_computed - seq.hashed_blocks * size >= size:
                self.blocks.publish(seq)
            if seq.saving is not None or seq.restoring is not None:
                self.blocks.book_state(seq)
            if (
                self._unforked
                and seq.seq_id in self._unforked
                and seq.num_computed >= seq.prompt_len
            ):
                self._fork(seq)
            if slides:
                self.blocks.slide(seq)

    def finish(self, seq: Sequence) -> None:
        """Remove a sequence from wherever it is, and free its blocks."""
        if seq.status is Status.RUNNING:
            del self.running[bisect_left(self.running, seq.seq_id, key=_BY_ID)]
        self._waiting.pop(seq.seq_id, None)
        seq.status = Status.FINISHED
        told = seq.told_kv_spans
        kv_spans = told.prefix(told.length)
        self.blocks.release(seq)
        if self.drafter is not None:
            self.drafter.finish(seq)
        seq.kv_spans = kv_spans  # the output still tells which weights computed what
        siblings = [s for s in self._unforked.pop(seq.seq_id, ()) if s.status is Status.WAITING]
        if siblings:
            self._wait_again(siblings[0])
            if siblings[1:]:
                self._unforked[siblings[0].seq_id] = siblings[1:]
                siblings[0].forks = True

    def recompute(self, sequences: Iterable[Sequence] | None = None) -> None:
        """Drop the KV of these live sequences; None: of all."""
        for seq in list(self.sequences() if sequences is None else sequences):
            if seq.status is Status.RUNNING:
                self._requeue(seq)
            else:
                self.blocks.release(seq)

    def pin_to(self, version: int, sequences: Iterable[Sequence]) -> None:
        """These live sequences finish on ``version``, which stops being the live one."""
        self.pin = version
        for seq in sequences:
            seq.pin = version
        self._sort_lanes()

    def pinned(self) -> list[Sequence]:
        """Live sequences that finish on the version before."""
        return [] if self.pin is None else [s for s in self.sequences() if s.pin is not None]

    def unpin(self, sequences: Iterable[Sequence] | None = None) -> None:
        """These go on with the live weights and the KV that they have; None: all pinned ones."""
        pinned = [s for s in self.pinned() if sequences is None or s in sequences]
        for seq in pinned:
            seq.pin = None
        if sequences is None:
            self.pin = None
        if pinned:
            self._sort_lanes()

    def begun(self) -> list[Sequence]:
        """Live sequences of requests of which any sample was ever admitted, also one that ended."""
        heaps = [lane.fresh for lane in self._lanes.values()]
        fresh = {s.request_id for heap in heaps for _, s in heap if s.status is Status.WAITING}
        return [seq for seq in self.sequences() if seq.request_id not in fresh]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the bookkeeping and the sequences disagree."""
        self.blocks.check_integrity(self.sequences())
        ids = [seq.seq_id for seq in self.running]
        assert ids == sorted(set(ids)), "running is out of order"
        assert all(seq.status is Status.RUNNING for seq in self.running)
        assert all(seq.pin in (None, self.pin) for seq in self.sequences()), "another pin"
        for pinned, lane in self._lanes.items():
            waiting = [s for _, s in lane.fresh + lane.started if s.status is Status.WAITING]
            assert all((s.pin is not None) == pinned for s in waiting), "in another lane"
        assert all(seq.status is Status.WAITING for seq in self._waiting.values())

    def _schedule_running(self, entries: list[ScheduledEntry], pinned: bool) -> int:
        """Decodes, then prefill chunks; returns the remaining budget."""
        budget, index, size = self._budget, 0, self.blocks.block_size
        prefills: list[Sequence] = []
        while index < len(self.running) and budget:
            seq = self.running[index]
            index += 1
            if (seq.pin is not None) != pinned:
                continue
            known = len(seq.token_ids)
            if known - seq.num_computed > 1:
                prefills.append(seq)
            elif known <= len(seq.block_table) * size or self._make_room(seq):
                entries.append(ScheduledEntry(seq, self.blocks.cut(seq, 1)))
                budget -= 1
        for seq in prefills:
            if budget:  # none of these was preempted since: the victims are newer
                budget -= self._schedule_chunk(entries, seq, budget)
        if prefills and not entries:
            budget -= self._unblock(entries, prefills[0], budget)
        return budget

    def _drafts_for(self, decoding: int) -> bool:
        return self.drafter is not None and decoding <= self._max_drafting

    def _draft(self, drafter: Drafter, batch: ScheduledBatch, budget: int) -> None:
        """Add drafts to entries that decode, where budget and blocks are left for them."""
        decoding = [
            entry
            for entry in batch.entries
            if entry.num_new <= (1 if entry.sequence.undone is None else _MOST_BEHIND)
            and entry.samples
            and entry.sequence.output_len
        ]
        for entry in decoding if self._drafts_for(len(decoding)) else ():
            seq = entry.sequence
            if not budget or seq.reads_tokens or not entry.draws_alone:
                continue
            seq.num_drafted = self.blocks.drafted_until(seq)
            tokens, context, ahead = drafter.draft(seq, budget)
            tokens = tokens[: self.blocks.draft_room(seq, entry.num_new)]
            if tokens and not self.blocks.begin_drafts(seq, entry.num_new, len(tokens)):
                continue
            if context:
                entry.draft_context, entry.draft_ahead = context, ahead
                seq.num_drafted = context.stop
                self.blocks.note_drafted(seq, context)
                batch.runs_draft = True
            entry.drafts, entry.num_new = tokens, entry.num_new + len(tokens)
            budget -= len(tokens) + len(context)

    def _schedule_chunk(self, entries: list[ScheduledEntry], seq: Sequence, budget: int) -> int:
        """What it takes of the budget; 0 where its windows have to wait for blocks."""
        count = self.blocks.cut(seq, min(seq.num_tokens - seq.num_computed, budget))
        if count:
            entries.append(ScheduledEntry(seq, count))
        return count

    def _unblock(self, entries: list[ScheduledEntry], seq: Sequence, budget: int) -> int:
        """As ``_schedule_chunk``, of a prefill for which all that runs waits for blocks."""
        while not (count := self._schedule_chunk(entries, seq, budget)):
            if not self._give_way(seq):
                return 0
        return count

    def _admit(self, entries: list[ScheduledEntry], budget: int, pinned: bool) -> int:
        """Prompts of sequences that waited; returns the remaining budget."""
        if not budget or len(self.running) >= self._max_seqs or self._next_heap(pinned) is None:
            return budget
        if not pinned and self._next_heap(True) is not None:
            return budget  # those have begun before
        in_flight = InFlightPrefixes(self.blocks, self.running)
        put_off: list[tuple[list[tuple[int, Sequence]], Sequence]] = []
        while budget and len(self.running) + len(put_off) < self._max_seqs:
            heap = self._next_heap(pinned)
            if heap is None:
                break
            seq = heap[0][1]
            found = in_flight.look_up(seq)
            if found is None:
                heapq.heappop(heap)
                put_off.append((heap, seq))
                continue
            if not self._has_adapter(seq) or not self._make_space(seq, found):
                self._refused = seq, self.blocks.num_free
                break
            heapq.heappop(heap)
            del self._waiting[seq.seq_id]
            seq.status = Status.RUNNING
            seq.own_tokens()
            if self.drafter is not None:
                self.drafter.begin(seq)
            insort(self.running, seq, key=_BY_ID)
            budget -= self._schedule_chunk(entries, seq, budget)
            in_flight.add(seq)
        for heap, seq in put_off:
            heapq.heappush(heap, (seq.seq_id, seq))
        return budget

    def _has_adapter(self, seq: Sequence) -> bool:
        """Whether its adapter lies on the devices in the next step: running ones may hold all."""
        if self.places is None or seq.adapter is None:
            return True
        seq.adapter_place = self.places.bring(seq.adapter.slot)
        return seq.adapter_place is not None

    def _make_space(self, seq: Sequence, found: PrefixHit) -> bool:
        """Reserve blocks for all known tokens of a sequence to admit, if there are enough."""
        # Leave room for the running ones to grow, or the newcomer is preempted at once.
        margin = min(len(self.running), self.blocks.num_blocks // 32)
        while not self.blocks.admit(seq, found, margin):
            if self.running or not self._drop_holders(keep=seq):
                return False
        return True

    def _is_full(self, waits: list[tuple[int, Sequence]]) -> bool:
        """Whether the top of this heap cannot be admitted until somebody ends.

        Where it found no blocks, none will do before more of them are free than there were then.
        """
        seq, free = self._refused
        full = len(self.running) >= self._max_seqs
        return full or (waits[0][1] is seq and self.blocks.num_free <= free)

    def _join_group(self, samples: list[Sequence]) -> None:
        params = samples[0].params
        if params.group_id is None or self.pin is None or (params.min_version or 0) > self.pin:
            return
        group = [seq for seq in self.pinned() if seq.group == samples[0].group]
        if not group:
            return
        adapter = samples[0].adapter
        if adapter is not None:  # as it was when that version was live
            theirs = {seq.adapter.name: seq.adapter for seq in group if seq.adapter is not None}
            adapter = theirs.get(adapter.name, adapter)
            if adapter.version >= self.blocks.version:
                return  # it never was with the pinned weights
        for seq in samples:
            seq.pin, seq.adapter = self.pin, adapter

    def _next_heap(self, pinned: bool) -> list[tuple[int, Sequence]] | None:
        """The heap of a lane whose top is the oldest sequence that may be admitted."""
        lane = self._lanes[pinned]
        started = _top(lane.started)
        fresh = _top(lane.fresh) if self.admitting else None
        if started and (fresh is None or started.seq_id < fresh.seq_id):
            return lane.started
        return lane.fresh if fresh else None

    def _lane_of(self, seq: Sequence) -> _Lane:
        return self._lanes[seq.pin is not None]

    def _sort_lanes(self) -> None:
        """After pins have changed: put each waiting sequence into its lane."""
        before, self._lanes = self._lanes, {False: _Lane(), True: _Lane()}
        for lane in before.values():
            for item in lane.fresh:
                heapq.heappush(self._lane_of(item[1]).fresh, item)
            for item in lane.started:
                heapq.heappush(self._lane_of(item[1]).started, item)

    def _make_room(self, seq: Sequence) -> bool:
        """A block for the next token of ``seq``; False if ``seq`` itself was preempted for it."""
        while not self.blocks.grow(seq):
            if not self._give_way(seq):
                return False
        return True

    def _give_way(self, seq: Sequence) -> bool:
        """Preempt the newest running sequence; False if that was ``seq``."""
        newest = self.running[-1]
        if newest is seq and self._drop_holders():
            return True
        self.preemptions += 1
        self._requeue(newest)
        return newest is not seq

    def _requeue(self, seq: Sequence) -> None:
        """Back to waiting, without KV but with its output."""
        del self.running[bisect_left(self.running, seq.seq_id, key=_BY_ID)]
        self.blocks.release(seq)
        self._wait_again(seq)

    def _wait_again(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        self._waiting[seq.seq_id] = seq
        heapq.heappush(self._lane_of(seq).started, (seq.seq_id, seq))

    def _drop_holders(self, keep: Sequence | None = None) -> bool:
        """Take the blocks that the newest request's waiting samples share, from all of them: until
        the last has none they are not free. False if none holds any.
        """
        holders = [s for s in self._waiting.values() if s.block_table and s is not keep]
        if not holders:
            return False
        newest = max(holders, key=_BY_ID).request_id
        for seq in holders:
            if seq.request_id == newest:
                self.blocks.release(seq)
        return True

    def _fork(self, first: Sequence) -> None:
        for seq in self._unforked.pop(first.seq_id):
            if seq.status is Status.WAITING:
                self.blocks.fork(first, seq)
                self._wait_again(seq)
        first.forks = False
        if self.blocks.states is not None:
            self.blocks.states.drop_hold(first)


@dataclass(slots=True)
class _Lane:
    """Heaps by seq_id; a finished sequence is dropped when it surfaces."""

    fresh: list[tuple[int, Sequence]] = field(default_factory=list)
    started: list[tuple[int, Sequence]] = field(default_factory=list)


def _top(heap: list[tuple[int, Sequence]]) -> Sequence | None:
    while heap and heap[0][1].status is not Status.WAITING:
        heapq.heappop(heap)
    return heap[0][1] if heap else None
