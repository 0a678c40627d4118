"""Decode steps captured as CUDA graphs, one for each padded batch size.

A graph holds addresses: of the weights, of the KV pages, and of the inputs below. So there is a set
over each of the two instances, and a commit goes on with the other set; or it exchanges their
contents. Who frees any of these (a sleep) drops the graphs and captures new ones afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.worker.graphs.decode_inputs import DecodeInputs, is_decode
from rollout.engine.worker.graphs.draw_graphs import CapturePool, DrawGraphs, capture
from rollout.errors import ConfigError
from rollout.models.forward import ForwardBatch

log = logging.getLogger(__name__)
Forward = Callable[[ForwardBatch], Tensor]


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


def graph_bytes(sizes: Sequence[int], states: Sequence[int], vocab: int, sets: int) -> int:
    """What to set aside for ``sets`` sets of graphs: logits of each of ``sizes``, taken as float32,
    and beside them what was measured on an H100 (a second set of 16 took 770 MB over 1.1 B
    parameters, 114 of it logits, and 524 over 8 B, 457 of it logits). ``states``: the bytes that
    each graph of a step with prompts gives; beside them such a graph is taken for one of those 16.
    """
    decode = sum(sizes) * vocab * 4 + (656 << 20)
    return sets * (decode + sum(states) + len(states) * (41 << 20))


class DecodeGraphs:
    """Captures ``forward`` for each of ``sizes`` and replays the smallest that holds a batch.

    All ranks of a model build it with the same sizes and give it the same batches, since captured
    collectives run in lockstep. ``inputs`` and ``pool`` are shared with what is never replayed at
    the same time. ``draws``: what ``FusedSampler`` does with the logits, too, one that is
    ``deterministic`` or not; the attribute is None where that could not be.
    """

    def __init__(
        self,
        forward: Forward,
        sizes: Sequence[int],
        inputs: DecodeInputs,
        pool: CapturePool,
        device: torch.device,
        draws: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.inputs, self.pool = inputs, pool
        self._captured: dict[int, tuple[Any, Tensor]] = {}  # by size: a graph, and its logits
        with torch.cuda.device(device):
            # The largest first: the smaller ones find room in the memory that it took.
            for size in sorted(set(sizes), reverse=True):
                run = partial(forward, self.inputs.batch(size))
                self._captured[size] = capture(run, self.pool)
            self.draws = self._capture_draws(deterministic) if draws else None
        self.sizes = tuple(sorted(self._captured))

    def run(self, batch: ForwardBatch) -> Tensor | None:
        """Logits of a decode batch (CPU), valid until the next call; None: run it without."""
        size = self._replay(batch)
        return None if size is None else self._captured[size][1][: len(batch.context_lens)]

    def draw(self, batch: ForwardBatch, sampling: SamplingMetadata) -> SamplerOutput | None:
        """What a decode batch draws, valid until the next call; None, and nothing has run: where no
        graph holds the batch, or its rows need another sampler.
        """
        if self.draws is None or not self.draws.takes(sampling):
            return None
        size = self._replay(batch, sampling)
        return None if size is None else self.draws.replay(size, sampling)

    def drop(self) -> None:
        """Free the graphs and their memory; ``run`` must not be called again."""
        for graph, _ in self._captured.values():
            graph.reset()
        if self.draws is not None:
            self.draws.drop()
        self._captured, self.draws = {}, None

    def _replay(self, batch: ForwardBatch, sampling: SamplingMetadata | None = None) -> int | None:
        """Of which size the graph was that ran; None: none can."""
        count = len(batch.context_lens)
        if not (count and is_decode(batch) and self.inputs.fits(batch)):
            return None
        size = next(size for size in self.sizes if size >= count)
        self.inputs.fill(batch, size, sampling)
        self._captured[size][0].replay()
        return size

    def _capture_draws(self, deterministic: bool) -> DrawGraphs | None:
        logits = {size: found for size, (_, found) in self._captured.items()}
        try:
            return DrawGraphs(logits, self.inputs, self.pool, deterministic)
        except Exception:  # it is as right outside of a graph, and only slower
            log.warning("the sampler is not captured with the decode steps", exc_info=True)
            return None
