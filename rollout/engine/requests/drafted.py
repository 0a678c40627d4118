"""A step with drafts, as the steps that it stands for.

Every row draws what it would draw in a step of its own: by its sequence's seed and its position. So
a draft is right exactly where it equals what the row before it drew, and of what is not right
nothing is left but KV that the next step writes over. No distribution is changed, whatever was
drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.sequences.sequence import ScheduledBatch, ScheduledEntry, Sequence, Status

#: hears of each draft: how many tokens it had, and how many of them were right
Judge = Callable[[Sequence, int, int], None]


@dataclass(slots=True)
class _Rows:
    """What a step has of one entry: its first row that draws, its first place whose experts the
    step brings and how many there are, and its first row that asks what was left to it; ``right``:
    how many of its drafts are.
    """

    entry: ScheduledEntry
    drawn: int
    experts: int
    num_experts: int
    kept: int
    right: int


def in_turn(
    batch: ScheduledBatch, output: SamplerOutput, judge: Judge
) -> Iterator[tuple[ScheduledBatch, SamplerOutput]]:
    """Steps without drafts, to be booked one after the other: the first with all that was known,
    each later one with the drafts that the one before has proved, of sequences that still run.
    """
    entries = list(_rows_of(batch, output.tokens.tolist()))
    for one in entries:
        if drafted := len(one.entry.drafts):
            judge(one.entry.sequence, drafted, one.right)
    first = _turn(batch, output, entries, 0)
    yield first[0], replace(first[1], hidden=output.hidden)
    for turn in range(1, 1 + max(one.right for one in entries)):
        going_on = [
            one
            for one in entries
            if one.right >= turn and one.entry.sequence.status is Status.RUNNING
        ]
        if not going_on:
            return
        yield _turn(batch, output, going_on, turn)


def _rows_of(batch: ScheduledBatch, tokens: list[int]) -> Iterator[_Rows]:
    drawn = experts = kept = 0
    for entry in batch.entries:
        seq, drafts = entry.sequence, entry.drafts
        right = 0
        while right < len(drafts) and tokens[drawn + right] == drafts[right]:
            right += 1
        num_experts = 0 if seq.experts is None else len(entry.expert_positions)
        yield _Rows(entry, drawn, experts, num_experts, kept, right)
        experts += num_experts
        if entry.samples:
            drawn += 1 + len(drafts)
            kept += 0 if seq.kept is None else 1 + len(drafts)


def _turn(
    batch: ScheduledBatch, output: SamplerOutput, rows: list[_Rows], turn: int
) -> tuple[ScheduledBatch, SamplerOutput]:
    entries: list[ScheduledEntry] = []
    drawn: list[int] = []
    experts: list[int] = []
    kept: list[int] = []
    for one in rows:
        entry, seq = one.entry, one.entry.sequence
        known = entry.num_new - len(entry.drafts)
        entries.append(ScheduledEntry(seq, 1 if turn else known))
        if turn or entry.samples:
            drawn.append(one.drawn + turn)
            if seq.kept is not None:
                kept.append(one.kept + turn)
        if seq.experts is not None:
            stop = one.experts + one.num_experts - len(entry.drafts)
            experts += [stop + turn - 1] if turn else range(one.experts, stop)
    scored = () if turn else range(len(output.processed), len(output.tokens))
    found = output.pick(drawn, scored, experts=experts, kept=kept)
    return replace(batch, entries=entries), found
