"""The sampler of a GPU: one transfer there, one kernel call, one transfer back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.engine.memory import to_device
from rollout.engine.sampling.draw import uniforms
from rollout.engine.sampling.metadata import (
    MIN_P,
    TEMPERATURE,
    TOP_P,
    SamplingBatch,
)
from rollout.engine.sampling.sampler import Drawn, Sampler, Samples
from rollout.generation import GREEDY_BELOW
from rollout.kernels import draw_tokens
from rollout.kernels.gpu_support import triton_runs


def make_sampler(device: torch.device) -> Sampler:
    """The sampler for logits on ``device``."""
    return DeviceSampler() if device.type == "cuda" and triton_runs() else Sampler()


class DeviceSampler(Sampler):
    """``Sampler`` by ``draw_tokens``: no sort, and the host waits once.

    Batches with edits, penalties or alternatives go the way of ``Sampler``. A row's draw is the
    same function of its seed and position; the order of float sums differs, so a draw right at the
    edge of two tokens may fall on the other side.
    """

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Samples:
        return self.draw(logits, batch).samples()

    def draw(self, logits: Tensor, batch: SamplingBatch) -> Drawn:
        if _is_special(batch):
            return super().draw(logits, batch)
        settings = to_device(torch.from_numpy(_settings(batch)), logits.device)
        numbers, draws = settings[:, 1:4].float(), settings[:, 5].contiguous()
        tokens, scores = draw_tokens(
            logits, settings[:, 0].long(), numbers, settings[:, 4].long(), draws
        )
        found = _to_host(torch.cat((tokens[:, None].double(), scores.double()), dim=1))
        return Drawn(tokens[: batch.num_sampled], lambda: _samples(found(), batch.num_sampled))


def _to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Start the copy of a tensor to the host; the result waits for it, from any thread."""
    if tensor.device.type == "cpu":
        return lambda: tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    cuda: Any = torch.cuda  # parts of it have no types
    copied = cuda.Event()
    copied.record(cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait


def _is_special(batch: SamplingBatch) -> bool:
    """Whether a row has edits, penalties or alternatives, or there is none."""
    edited = len(batch.edit_rows) or len(batch.history_rows)
    return bool(edited) or not batch.num_rows or int(batch.num_top.max()) > 0


def _samples(found: Tensor, count: int) -> Samples:
    """``found``: float64 [R, 4], token and scores; the first ``count`` rows were drawn."""
    scores, rows = found[:, 1:].float(), len(found)
    return Samples(
        found[:, 0].long(),
        scores[:, 0].contiguous(),
        scores[:count, 1].contiguous(),
        scores[:count, 2].contiguous(),
        torch.zeros(rows, 0, dtype=torch.int32),
        torch.zeros(rows, 0),
    )


def _settings(batch: SamplingBatch) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """float64 [R, 6]: given token or -1, temperature (0 greedy), top_p, min_p, top_k, draw."""
    count = batch.num_sampled
    table = np.zeros((batch.num_rows, 6))
    temperature = batch.numbers[:, TEMPERATURE]
    table[:count, 0], table[count:, 0] = -1, batch.targets
    table[:count, 1] = np.where(temperature < GREEDY_BELOW, 0, temperature)
    table[:count, 2], table[count:, 2] = batch.numbers[:, TOP_P], 1
    table[:count, 3] = batch.numbers[:, MIN_P]
    table[:count, 4] = batch.top_k
    table[:count, 5] = uniforms(batch.seeds, batch.counters)
    return table
