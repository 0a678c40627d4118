"""What a load did with each tensor of a checkpoint, as lines on stderr (``--trace-load``)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from rollout.errors import WeightMismatch
from rollout.loader import Checkpoint
from rollout.models.weight_io.table import WeightTable
from rollout.weights import LazyTensor
from rollout.weights.names import placed


def traced(
    items: Iterator[tuple[str, LazyTensor]], checkpoint: Checkpoint, table: WeightTable, rank: int
) -> Iterator[tuple[str, LazyTensor]]:
    """``items`` as they are; behind each a line of what this rank read of it before it asked for
    the next one, in which time, and in which boxes of which parameters that lies.
    """
    for name, value in items:
        read, started = checkpoint.bytes_read, time.perf_counter()
        yield name, value
        seconds, read = time.perf_counter() - started, checkpoint.bytes_read - read
        dtype = str(value.dtype).removeprefix("torch.")
        sys.stderr.write(  # one write a line: ranks share it
            f"rollout rank {rank}: {name} {list(value.shape)} {dtype}: read {read} bytes in "
            f"{seconds * 1e3:.2f} ms -> {_where(table, name, tuple(value.shape))}\n"
        )
        sys.stderr.flush()


def _where(table: WeightTable, name: str, shape: tuple[int, ...]) -> str:
    own = placed(name, table.prefixes)
    if own is None:
        return "passed over"
    try:
        parts = [part for part, _ in table.spellings.split_shape(own, shape)]
    except WeightMismatch:
        return "refused"
    found = []
    for part in parts:
        if part in table.aliases:
            found.append(f"compared with {table.aliases[part]}")
        found += [
            f"{slot.param}{slot.put}" for slot in table.slots.get(part, ()) if slot.take.numel
        ]
    return ", ".join(found) or "nothing of this rank"
