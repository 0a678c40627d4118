"""Steps with prompt tokens captured as CUDA graphs, by their padded numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollout.engine.worker.graphs.draw_graphs import CapturePool, capture
from rollout.engine.worker.graphs.prefill_inputs import PrefillInputs, PrefillShape
from rollout.kernels.paged_attention import has_few_queries
from rollout.models.forward import ForwardBatch


class PrefillGraphs:
    """Captures ``states`` for each of ``shapes`` and replays the smallest that holds a step.

    ``states`` gives the hidden states [tokens, hidden] of a batch whose ``logit_rows`` are all of
    its tokens. The head is not captured: which tokens need logits differs from step to step, and
    those of padding would cost more than its launch. ``inputs`` and ``pool`` are shared with what
    is never replayed at the same time. In lockstep on all ranks, as ``DecodeGraphs``.
    """

    def __init__(
        self,
        states: Callable[[ForwardBatch], Tensor],
        shapes: Iterable[PrefillShape],
        inputs: PrefillInputs,
        pool: CapturePool,
        device: torch.device,
    ) -> None:
        self.inputs = inputs
        self._captured: dict[PrefillShape, tuple[Any, Tensor]] = {}
        with torch.cuda.device(device):
            # The largest first: the smaller ones find room in the memory that it took.
            for shape in sorted(shapes, reverse=True):
                run = partial(states, inputs.batch(shape))
                self._captured[shape] = capture(run, pool)
        self._shapes = {
            few: sorted(shape for shape in self._captured if has_few_queries(*shape) == few)
            for few in (False, True)
        }

    def run(self, batch: ForwardBatch) -> Tensor | None:
        """Hidden states [rows, hidden] of the ``logit_rows`` of a batch (CPU); None: run it
        without.
        """
        shape = self._shape_for(batch)
        if shape is None:
            return None
        rows = self.inputs.fill(batch, shape)
        graph, states = self._captured[shape]
        graph.replay()
        return states[rows]

    def drop(self) -> None:
        """Free the graphs and their memory; ``run`` must not be called again."""
        for graph, _ in self._captured.values():
            graph.reset()
        self._captured = {}

    def _shape_for(self, batch: ForwardBatch) -> PrefillShape | None:
        found = self.inputs.shape_of(batch)
        if found is None:
            return None
        tokens, few = found
        return next((shape for shape in self._shapes[few] if shape.tokens >= tokens), None)
