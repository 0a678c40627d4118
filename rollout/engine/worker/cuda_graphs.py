"""Decode steps captured as CUDA graphs, one for each padded batch size.

A graph holds addresses: of the weights, of the KV pages, and of the inputs below. So there is a set
over each of the two instances, and a commit goes on with the other set; or it exchanges their
contents. Who frees any of these (a sleep) drops the graphs and captures new ones afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.errors import ConfigError
from rollout.models.forward import ForwardBatch

_cuda: Any = torch.cuda  # parts of it have no types
Forward = Callable[[ForwardBatch], Tensor]
_WARM_UPS = 2  # runs before a capture: kernels compile, libraries allocate their workspaces


def padded_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, ... and ``largest``: at most a third of a batch is padding."""
    sizes = {largest}
    power = 1
    while power < largest:
        sizes |= {power, min(largest, power + power // 2)}
        power *= 2
    return tuple(sorted(sizes))


def wants_graphs(config: EngineConfig, device: torch.device, own_model: bool) -> bool:
    """Whether decode steps are to be captured; ``own_model``: the class is one of this package's.

    A model from elsewhere may do what no graph can hold, so "auto" leaves it alone.
    """
    if device.type != "cuda" or config.cuda_graphs == "off":
        return False
    from rollout.kernels.gpu_support import triton_runs

    return triton_runs() and (own_model or config.cuda_graphs == "on")


def check_graphs(config: EngineConfig, device: torch.device) -> None:
    """``ConfigError`` where graphs were asked for that cannot be captured."""
    if config.cuda_graphs == "on" and device.type != "cuda":
        raise ConfigError(
            f"cuda_graphs='on' captures decode steps on a GPU, but this engine runs on {device}; "
            "use 'auto' or 'off'"
        )


def graph_bytes(sizes: Sequence[int], vocab: int, sets: int) -> int:
    """What to set aside for ``sets`` sets of graphs: logits, taken as float32, and beside them what
    was measured on an H100 (a second set of 16 took 770 MB over 1.1 B parameters, 114 of it
    logits, and 524 over 8 B, 457 of it logits).
    """
    return sets * (sum(sizes) * vocab * 4 + (656 << 20))


def is_decode(batch: ForwardBatch) -> bool:
    """Whether every sequence has one token and wants the logits after it; ``batch`` on the CPU."""
    count = len(batch.context_lens)
    if not count == len(batch.input_ids) == len(batch.logit_rows):
        return False
    steps = torch.arange(count + 1)
    return torch.equal(batch.query_starts.long(), steps) and torch.equal(
        batch.logit_rows, steps[:count]
    )


class DecodeInputs:
    """The inputs of decode steps at fixed addresses, and a copy of them in pinned host memory.

    One transfer moves what is short, a second the rows of the block tables in use. Padding rows
    have no slot, so they write nothing, and read the first position of block 0.
    """

    def __init__(self, rows: int, max_blocks: int, device: torch.device) -> None:
        self.rows, self.max_blocks = rows, max_blocks
        words = 3 * rows + -(-rows // 2)
        on_card = device.type == "cuda"
        self._host = torch.zeros(words, dtype=torch.int64, pin_memory=on_card)
        self._device = torch.zeros(words, dtype=torch.int64, device=device)
        shape = (rows, max_blocks)
        self._host_tables = torch.zeros(shape, dtype=torch.int32, pin_memory=on_card)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(rows, device=device)
        self._copied: Any = _cuda.Event() if on_card else None
        self._clear(0, rows)
        self._device.copy_(self._host)

    def fits(self, batch: ForwardBatch) -> bool:
        count, width = batch.block_tables.shape
        told = (batch.visual, batch.state_slots, batch.adapter_rows, batch.forced_experts)
        plain = batch.positions.dim() == 1 and all(one is None for one in told)
        return plain and count <= self.rows and width <= self.max_blocks

    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Take over a decode batch (CPU) of at most ``size`` rows; the rest of them is padding.

        Its ``input_ids`` may be on the device already, where the step before has drawn them.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the transfer of the step before
        count, width = batch.block_tables.shape
        ids, positions, slots, lengths = self._views(self._host)
        here = batch.input_ids.device == ids.device
        ids[:count] = batch.input_ids if here else 0
        positions[:count] = batch.positions
        slots[:count], lengths[:count] = batch.slot_mapping, batch.context_lens
        self._clear(count, size)
        self._host_tables[:count, :width] = batch.block_tables
        self._device.copy_(self._host, non_blocking=True)
        if not here:
            self._device[:count] = batch.input_ids
        self._tables[:count].copy_(self._host_tables[:count], non_blocking=True)
        if self._copied is not None:
            self._copied.record(_cuda.current_stream(self._device.device))

    def batch(self, size: int) -> ForwardBatch:
        """The first ``size`` rows, on the device."""
        ids, positions, slots, lengths = self._views(self._device)
        return ForwardBatch(
            input_ids=ids[:size],
            positions=positions[:size],
            slot_mapping=slots[:size],
            query_starts=self._starts[: size + 1],
            context_lens=lengths[:size],
            block_tables=self._tables[:size],
            logit_rows=self._logit_rows[:size],
        )

    def _clear(self, start: int, stop: int) -> None:
        ids, positions, slots, lengths = self._views(self._host)
        ids[start:stop] = positions[start:stop] = 0
        slots[start:stop], lengths[start:stop] = -1, 1
        self._host_tables[start:stop, :1] = 0

    def _views(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n = self.rows
        return (
            words[:n],
            words[n : 2 * n],
            words[2 * n : 3 * n],
            words[3 * n :].view(torch.int32)[:n],
        )


@dataclass(frozen=True)
class _Captured:
    graph: Any
    logits: Tensor  # [size, vocabulary], written by every replay


class DecodeGraphs:
    """Captures ``forward`` for each of ``sizes`` and replays the smallest that holds a batch.

    All ranks of a model build it with the same sizes and give it the same batches, since captured
    collectives run in lockstep. ``max_blocks``: the longest block table. ``beside``: another
    set, never replayed at the same time, whose inputs and memory this one shares.
    """

    def __init__(
        self,
        forward: Forward,
        sizes: Sequence[int],
        max_blocks: int,
        device: torch.device,
        beside: DecodeGraphs | None = None,
    ) -> None:
        self.device = device
        self.inputs: DecodeInputs = (
            beside.inputs if beside else DecodeInputs(max(sizes), max_blocks, device)
        )
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = beside._pool if beside else torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            # The largest first: the smaller ones find room in the memory that it took.
            for size in sorted(set(sizes), reverse=True):
                self._captured[size] = _capture(forward, self.inputs.batch(size), self._pool)
        self.sizes = tuple(sorted(self._captured))

    def run(self, batch: ForwardBatch) -> Tensor | None:
        """Logits of a decode batch (CPU), valid until the next call; None: run it without."""
        count = len(batch.context_lens)
        if not (count and is_decode(batch) and self.inputs.fits(batch)):
            return None
        size = next(size for size in self.sizes if size >= count)
        self.inputs.fill(batch, size)
        captured = self._captured[size]
        captured.graph.replay()
        return captured.logits[:count]

    def drop(self) -> None:
        """Free the graphs and their memory; ``run`` must not be called again."""
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured = {}


def _capture(forward: Forward, batch: ForwardBatch, pool: Any) -> _Captured:
    # Of high priority, which its kernels keep in every replay: an update's copies give way.
    side = _cuda.Stream(priority=-1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            forward(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Thread-local: NCCL's watchdog and the staging thread may call CUDA meanwhile.
    with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
        logits = forward(batch)
    return _Captured(graph, logits)
