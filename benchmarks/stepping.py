"""Decode steps of whole executors, without a scheduler: what the ranks and the way to them cost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol
from unittest.mock import patch

from torch import Tensor

from rollout.config import EngineConfig
from rollout.engine.executors import multiprocess
from rollout.engine.executors.multiprocess import MultiprocessExecutor
from rollout.engine.sequences.sequence import ScheduledBatch, ScheduledEntry
from rollout.engine.sequences.sequence import Sequence as Sample
from rollout.engine.steps.batch import encode_batch
from rollout.generation import SamplingParams
from rollout.wire.frames import Reply

BLOCK = 32
CHUNK = 2048  # tokens of one step that fills pages


@contextlib.contextmanager
def running(
    checkpoint: str, ranks: int, pool_tokens: int, *, shared: bool = True, longest: int = 4096,
    layout: str = "auto", threads: int = 2,
) -> Iterator[MultiprocessExecutor]:  # fmt: skip
    """An executor of ``ranks`` that share ``threads``, with ``pool_tokens`` of written KV.

    ``shared=False``: the ranks sum and gather through sockets, as they do without a compiler.
    """
    config = EngineConfig(
        model=checkpoint,
        dtype="bfloat16",
        device="cpu",
        executor="multiprocess",
        tensor_parallel_size=ranks,
        num_threads=threads // ranks,
        max_model_len=max(longest, CHUNK),
        block_size=BLOCK,
        weight_layout=layout,
    )
    executor = MultiprocessExecutor(config)
    memory = multiprocess.create_shared if shared else lambda size: None
    try:
        with patch.object(multiprocess, "create_shared", memory):
            executor.start()
        blocks = pool_tokens // BLOCK
        for future in executor.call("init_kv", {"num_blocks": blocks}):
            future.result(60)
        for first in range(0, blocks, CHUNK // BLOCK):  # pages never written would read as one
            table = list(range(first, min(first + CHUNK // BLOCK, blocks)))
            tokens = len(table) * BLOCK
            step(executor, [ScheduledEntry(_sample(first, table, tokens), tokens)])
        yield executor
    finally:
        executor.close()


class Calls(Protocol):
    """An executor, or an engine's core."""

    def call(
        self, method: str, args: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> list[Future[Reply]]: ...


class Decoding:
    """``batch`` sequences of ``context`` tokens that take single steps and never grow.

    They share the pool's blocks where it is smaller than all of them.
    """

    def __init__(self, executor: Calls, pool_tokens: int, batch: int, context: int) -> None:
        """``executor``: what has its ``call``."""
        self._executor = executor
        blocks, need = pool_tokens // BLOCK, -(-(context + 1) // BLOCK)
        self.entries = []
        for i in range(batch):
            table = [(i * need + j) % blocks for j in range(need)]
            sample = _sample(i, table, context)
            sample.num_computed = context
            sample.token_ids.append(5)
            self.entries.append(ScheduledEntry(sample, 1))

    def turn(self, steps: int) -> float:
        """Seconds of one step, the mean of ``steps``."""
        started = time.perf_counter()
        for _ in range(steps):
            step(self._executor, self.entries)
        return (time.perf_counter() - started) / steps


def step(executor: Calls, entries: list[ScheduledEntry]) -> None:
    call = encode_batch(ScheduledBatch(entries, 0), BLOCK)
    for future in executor.call("step", *call):
        future.result(120)


def _sample(index: int, table: list[int], tokens: int) -> Sample:
    sample = Sample(
        seq_id=index,
        request_id=f"r{index}",
        index=0,
        params=SamplingParams(temperature=0.0, max_tokens=64),
        seed=index,
        prompt_token_ids=[3 + (7 * index + i) % 200 for i in range(tokens)],
    )
    sample.block_table = table
    return sample
