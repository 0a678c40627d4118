"""The sampler of a GPU: one transfer there, one kernel call, one transfer back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollout.engine.memory import to_device
from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.sampling.metadata import MIN_P, TEMPERATURE, TOP_P, Floats, SamplingMetadata
from rollout.engine.sampling.sampler import Sampler, uniforms
from rollout.generation import GREEDY_BELOW
from rollout.kernels import sample
from rollout.kernels.gpu_support import triton_runs


def make_sampler(device: torch.device, deterministic: bool = False) -> Sampler | FusedSampler:
    """The sampler for logits on ``device``."""
    fused = device.type == "cuda" and triton_runs() and not deterministic
    return FusedSampler() if fused else Sampler()


class FusedSampler:
    """A ``Sampler`` by one kernel, ``sample``: no sort, and the host waits once.

    Batches with allowed tokens, edits, penalties, alternatives, kept sets to tell or rows that
    score at a temperature go to a ``Sampler``. A row's draw
    is the same function of its seed and position; the order of float sums differs, so a draw right
    at the edge of two tokens may fall on the other side.
    """

    def __init__(self) -> None:
        self._others = Sampler()

    def sample(self, logits: Tensor, sampling: SamplingMetadata) -> SamplerOutput:
        """As ``Sampler.sample``."""
        if is_special(sampling):
            return self._others.sample(logits, sampling)
        settings = to_device(torch.from_numpy(_settings(sampling)), logits.device)
        numbers, draws = settings[:, 1:4].float(), settings[:, 5].contiguous()
        tokens, scores = sample(
            *(logits, settings[:, 0].long(), numbers, settings[:, 4].long(), draws),
            filtered=has_filters(sampling),
        )
        count, none = (
            sampling.num_sampled,
            scores.new_empty(sampling.num_rows, 0),
        )
        raw, processed, log_kept = scores.unbind(1)
        return SamplerOutput(tokens, raw, processed[:count], log_kept[:count], none.int(), none)


def is_special(sampling: SamplingMetadata) -> bool:
    """Whether a row has what no kernel does, or there is none."""
    edited = any(map(len, (*sampling.processed_rows, sampling.kept_rows)))
    edited = edited or len(sampling.target_temperatures) > 0
    return edited or not sampling.num_rows or int(sampling.num_top.max()) > 0


def has_filters(sampling: SamplingMetadata) -> bool:
    """Whether a row has top_k, top_p or min_p."""
    numbers = sampling.numbers
    dropped = (numbers[:, TOP_P] < 1) | (numbers[:, MIN_P] > 0) | (sampling.top_k > 0)
    return bool(dropped.any())


def row_numbers(sampling: SamplingMetadata) -> Floats:
    """float32 [S, 3], as ``sample`` takes them: temperature (0 greedy), top_p, min_p."""
    numbers = sampling.numbers[:, [TEMPERATURE, TOP_P, MIN_P]]
    numbers[numbers[:, 0] < GREEDY_BELOW, 0] = 0
    return numbers


def _settings(sampling: SamplingMetadata) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """float64 [R, 6]: given token or -1, temperature (0 greedy), top_p, min_p, top_k, draw."""
    count = sampling.num_sampled
    table = np.zeros((sampling.num_rows, 6))
    table[:count, 0], table[count:, 0] = -1, sampling.targets
    table[:count, 1:4], table[count:, 2] = row_numbers(sampling), 1
    table[:count, 4] = sampling.top_k
    table[:count, 5] = uniforms(sampling.seeds, sampling.counters)
    return table
