"""Drives an executor by hand-made batches, as the core would."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from engine_exec.sampling import sequence

from rollout.config import EngineConfig
from rollout.engine.executors import make_executor
from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.sequences.sequence import ScheduledBatch, ScheduledEntry
from rollout.engine.steps.batch import encode_batch
from rollout.generation import SamplingParams

BLOCK = 4


def config(model, **settings) -> EngineConfig:
    defaults = {"dtype": "float32", "block_size": BLOCK, "num_threads": 1, "start_timeout": 60.0}
    return EngineConfig(model=str(model), **{**defaults, **settings})


@contextlib.contextmanager
def running(model, num_blocks=64, **settings):
    executor = make_executor(config(model, **settings))
    try:
        executor.start()
        for future in executor.call("init_kv", {"num_blocks": num_blocks}):
            future.result(60)
        yield executor
    finally:
        executor.close()


def step(executor, entries, version=0):
    """One step of ``[(sequence, num_new)]``; rank 0's output, and appends the tokens."""
    batch = ScheduledBatch([ScheduledEntry(s, n) for s, n in entries], version)
    return end(batch, begin(executor, batch))


def begin(executor, batch):
    """The futures of a step."""
    return executor.call("step", *encode_batch(batch, BLOCK))


def end(batch, futures):
    version = batch.version
    sampling = [e.sequence for e in batch.entries if e.samples]
    replies = [f.result(60) for f in futures]
    assert {reply["version"] for reply, _ in replies} == {version}
    assert all(not tensors for _, tensors in replies[1:])
    out = SamplerOutput.from_tensors(replies[0][1])
    for entry in batch.entries:
        entry.sequence.advance(entry.num_new, version)
    columns = (out.tokens[: len(sampling)], out.raw[: len(sampling)])
    columns = [c.tolist() for c in (*columns, out.processed, out.log_kept_mass)]
    for s, token, raw, processed, mass in zip(sampling, *columns, strict=True):
        s.append(token, version, raw, processed, mass)
    return out


def generate(executor, prompts, max_tokens, params=None, chunk=1000, version=0, ahead=False):
    """Continue every prompt; prompts enter ``chunk`` tokens at a time beside decodes.

    ``ahead``: where all draw a token, the next step is begun before that one is looked at.
    """
    params = params or SamplingParams(temperature=0.0, max_tokens=max_tokens)
    sequences = []
    for i, prompt in enumerate(prompts):
        need = -(-(len(prompt) + max_tokens) // BLOCK)
        first = sum(len(s.block_table) for s in sequences)
        sequences.append(
            sequence(
                params,
                prompt=prompt,
                seed=i,
                seq_id=i,
                computed=0,
                blocks=range(first, first + need),
            )
        )
    begun, number = None, 0
    while True:
        left = [s for s in sequences if s.output_len < max_tokens]
        if not left:
            return sequences
        if begun is None:
            due = [ScheduledEntry(s, min(chunk, s.num_tokens - s.num_computed)) for s in left]
            number += 1
            begun = ScheduledBatch(due, version, number)
            futures = begin(executor, begun)
        batch, ended, begun = begun, futures, None
        go_on = min(max_tokens - s.output_len for s in left) > 1
        if ahead and go_on and all(entry.samples for entry in batch.entries):
            rows = list(reversed(range(len(left))))  # in another order than before
            entries = [ScheduledEntry(batch.entries[row].sequence, 1) for row in rows]
            number += 1
            begun = ScheduledBatch(entries, version, number, rows)
            futures = begin(executor, begun)
        end(batch, ended)


def children() -> set[int]:
    """Processes whose parent is this one, zombies included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def wait_until(condition, timeout=5.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)
