"""A scheduler driven step by step over the toy model, checked against its oracle at every step."""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine_core.toy_model import VOCAB, WHOLE, ToyExecutor, chain
from torch import Tensor

from rollout.config import EngineConfig
from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.scheduling.grouped_blocks import make_block_manager
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.state_slots import StateSlots
from rollout.engine.sequences.sequence import ScheduledBatch, Sequence, Status
from rollout.engine.steps.batch import encode_batch
from rollout.generation import SamplingParams
from rollout.models.decoder.kv_groups import KVGroup


class Bench:
    """Owns one scheduler and one toy; every sampled token and every stored state is checked.

    ``snapshots``: the model is one with recurrent states, with so many slots for snapshots, made at
    every second block.
    """

    def __init__(
        self,
        num_blocks: int = 32,
        block_size: int = 4,
        budget: int = 16,
        max_seqs: int = 8,
        caching: bool = True,
        snapshots: int | None = None,
        groups: Items[KVGroup] = WHOLE,
    ) -> None:
        self.states = None if snapshots is None else StateSlots(max_seqs, snapshots, every=2)
        self.slots: dict[int, tuple[tuple[int, int], ...]] = {}  # (token, version) they have seen
        config = EngineConfig(
            model="toy", block_size=block_size, enable_prefix_caching=caching,
            max_num_batched_tokens=budget, max_num_seqs=min(max_seqs, budget),
        )  # fmt: skip
        self.blocks = make_block_manager(config, num_blocks, groups, 1, self.states)
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=max_seqs, max_num_batched_tokens=budget
        )
        self.toy = ToyExecutor(block_size=block_size, groups=groups)
        self.toy.call("init_kv", {"num_blocks": num_blocks})
        self.budget, self.max_seqs = budget, max_seqs
        self.all: list[Sequence] = []
        self.version = 0

    def submit(
        self, prompt: list[int], max_tokens: int = 4, n: int = 1, scored: bool = False
    ) -> list[Sequence]:
        params = SamplingParams(n=n, max_tokens=max_tokens, prompt_logprobs=1 if scored else None)
        samples = [
            Sequence(
                seq_id=len(self.all) + i,
                request_id=f"r{len(self.all)}",
                index=i,
                params=params,
                seed=i,
                prompt_token_ids=prompt,
                shares_prompt=n > 1,
            )
            for i in range(n)
        ]
        self.all += samples
        self.scheduler.add(samples)
        return samples

    def step(self, leave_out: int = 0) -> ScheduledBatch:
        """``leave_out``: bit i is set where row i goes into a later step, as without its mask."""
        batch = self.scheduler.schedule()
        assert batch.num_tokens <= self.budget
        assert len(batch.entries) <= self.max_seqs
        batch = batch.rows([row for row in batch.rows_running if not leave_out >> row & 1])
        if not batch.entries:
            self.check()
            return batch
        states = [self._check_entry(e.sequence, e.num_new, batch.version) for e in batch.entries]
        args, tensors = encode_batch(batch, self.blocks.block_size)
        if self.states is not None:
            self._run_states(batch, tensors)
        header, reply = self.toy.call("step", args, tensors)[0].result(0)
        output = SamplerOutput.from_tensors(reply)
        assert header["version"] == batch.version
        assert batch.version in (self.version, self.scheduler.pin)
        assert all(self.blocks.version_of(e.sequence) == batch.version for e in batch.entries)
        drawing = [
            (entry.sequence, state)
            for entry, state in zip(batch.entries, states, strict=True)
            if entry.samples
        ]
        self.scheduler.advance(batch)
        for (seq, state), token in zip(drawing, output.tokens.tolist(), strict=False):
            assert token == state % VOCAB, f"{seq}: the pages are not what they should be"
            seq.append(token, batch.version, 0.0, 0.0, 0.0)
            if seq.output_len == seq.params.max_tokens:
                seq.finish_reason = "length"
                self.scheduler.finish(seq)
        self.check()
        return batch

    def run(self, limit: int = 2000) -> int:
        """Until everything has finished; returns the steps it took."""
        for count in range(limit):
            if not self.step().entries:
                live = [seq for seq in self.all if seq.status is not Status.FINISHED]
                assert not live, f"stalled with {live}"
                return count
        raise AssertionError(f"not finished within {limit} steps")

    def commit(self, in_flight: str = "keep") -> None:
        """What was pinned by the one before goes on by the live weights, by then."""
        self.scheduler.unpin()
        if in_flight == "pin" and (begun := self.scheduler.begun()):
            self.scheduler.pin_to(self.version, begun)
        self.version += 1
        self.toy.call("commit", {"version": self.version})
        self.blocks.set_version(self.version, pin=self.scheduler.pin is not None)
        if in_flight == "recompute":
            self.scheduler.recompute()

    def check(self) -> None:
        self.scheduler.check_integrity()
        assert len(self.scheduler.running) <= self.max_seqs

    def _run_states(self, batch: ScheduledBatch, tensors: dict[str, Tensor]) -> None:
        """What the ranks do with slots, on what a state would have seen."""
        for source, target in tensors["state_restores"].tolist():
            self.slots[target] = self.slots[source]
        for entry, slot in zip(batch.entries, tensors["state_slots"].tolist(), strict=True):
            seq = entry.sequence
            seen = self.slots[slot] if entry.start else ()
            spans = seq.kv_spans.spans()
            versions = [span.version for span in spans for _ in range(span.start, span.stop)]
            known = seq.token_ids[: entry.start]
            assert seen == tuple(zip(known, versions, strict=True)), f"{seq}: another state"
            new = seq.token_ids[entry.start : entry.stop]
            self.slots[slot] = (*seen, *((token, batch.version) for token in new))
        for source, target in tensors["state_saves"].tolist():
            self.slots[target] = self.slots[source]

    def _check_entry(self, seq: Sequence, num_new: int, version: int) -> int:
        """Compare every stored state the step will read; returns the state it should end with."""
        start, size = seq.num_computed, self.blocks.block_size
        weights = [
            self.toy.contents[span.version]
            for span in seq.kv_spans.spans()
            for _ in range(span.start, span.stop)
        ]
        assert len(weights) == start
        weights += [self.toy.contents[version]] * num_new
        states = chain(seq.token_ids[: start + num_new], weights, self.toy.groups)
        tables = [seq.block_table, *seq.more_tables]
        for group, table in zip(self.toy.groups, tables, strict=True):
            for p in range(group.first(start), start):
                slot = table[p // size] * size + p % size
                assert self.toy.pages[slot] == states[p], f"{seq}: position {p} holds another state"
        return states[-1]
