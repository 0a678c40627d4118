"""The sampler of a GPU: of most steps one transfer there, one kernel call, one transfer back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout.engine.memory import to_device
from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.sampling.metadata import (
    MIN_P,
    TEMPERATURE,
    TOP_P,
    Floats,
    SamplingMetadata,
    process_logits,
)
from rollout.engine.sampling.sampler import (
    Sampler,
    alternatives,
    kept_sets,
    neighbours,
    slices,
    uniforms,
)
from rollout.generation import GREEDY_BELOW
from rollout.kernels import sample, scan_logits
from rollout.kernels.gpu_support import triton_runs


def make_sampler(device: torch.device, deterministic: bool = False) -> Sampler | FusedSampler:
    """The sampler for logits on ``device``; ``deterministic``: no row's bits depend on others."""
    fused = device.type == "cuda" and triton_runs()
    return FusedSampler(deterministic) if fused else Sampler()


class FusedSampler:
    """A ``Sampler`` by one kernel, ``sample``: no sort, and the host waits once, but for rows that
    tell what filters left.

    Rows with allowed tokens, edits or penalties are drawn from a copy that has them, and scored by
    the logits themselves. Batches with alternatives that are not raw, or rows that score at a
    temperature, go to a ``Sampler``. A row's draw is the same function of its seed and position;
    the order of float sums differs, so a draw right at the edge of two tokens may fall on the other
    side. ``deterministic``: each row is drawn as if it were alone, whatever the others ask for, and
    by kernels that were compiled once.
    """

    def __init__(self, deterministic: bool = False) -> None:
        self._others, self._deterministic = Sampler(), deterministic

    def sample(self, logits: Tensor, sampling: SamplingMetadata) -> SamplerOutput:
        """As ``Sampler.sample``."""
        apart = self._deterministic and is_special(sampling)
        if not sampling.num_rows or not (apart or is_edited(sampling)):
            return self._sample(logits, sampling)
        runs = _runs(sampling) if self._deterministic else [(0, sampling.num_rows)]
        parts = [part for run in runs for part in slices(logits, *run)]
        return SamplerOutput.cat([self._sample(logits[a:b], sampling.rows(a, b)) for a, b in parts])

    def _sample(self, logits: Tensor, sampling: SamplingMetadata) -> SamplerOutput:
        if is_special(sampling):
            return self._others.sample(logits, sampling)
        count, filtered = sampling.num_sampled, self._deterministic or has_filters(sampling)
        settings = to_device(torch.from_numpy(_settings(sampling)), logits.device)
        if not is_edited(sampling):
            return told(logits, Drawn(*_run(logits, settings, filtered)), sampling)
        values = self._others.copy(logits[:count])
        process_logits(values, sampling)
        drawn = Drawn(*_run(values, settings[:count], filtered))
        settings[:count] = 0
        settings[:count, 0] = drawn.tokens
        tokens, scores, _ = _run(logits, settings, self._deterministic)
        scores[:count, 1:] = drawn.scores[:, 1:]
        return told(logits, Drawn(tokens, scores, drawn.least), sampling, values)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What ``sample`` gives of rows: [R], [R, 3] and [R]."""

    tokens: Tensor
    scores: Tensor
    least: Tensor


def told(
    logits: Tensor, drawn: Drawn, sampling: SamplingMetadata, values: Tensor | None = None
) -> SamplerOutput:
    """What was ``drawn`` of ``logits``, or of ``values`` in their place, and what its rows ask for
    beside that: alternatives, and what filters left.
    """
    count, (raw, processed, log_kept) = sampling.num_sampled, drawn.scores.unbind(1)
    none = drawn.scores.new_empty(len(raw), 0)
    top = none.int(), none
    if most := sampling.most_top:
        # By the token's own score, which is then that of the same token among them.
        own = logits.gather(1, drawn.tokens[:, None])[:, 0].double()
        lse = own - raw.double()
        if len(sampling.targets):  # some may be impossible, and say nothing of the others
            best, _, _, mass = scan_logits(logits[count:], None)
            whole = best.double() + mass.log()
            lse[count:] = torch.where(own[count:] > -torch.inf, lse[count:], whole)
        top = alternatives(logits, lse, sampling.num_top, most)
    kept: dict[str, Tensor] = {}
    if len(sampling.kept_rows):
        kept = kept_sets(logits if values is None else values, drawn.least, sampling.kept_rows)
    return SamplerOutput(drawn.tokens, raw, processed[:count], log_kept[:count], *top, **kept)


def _run(logits: Tensor, settings: Tensor, filtered: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``sample`` by the columns of ``_settings``."""
    numbers, draws = settings[:, 1:4].float(), settings[:, 5].contiguous()
    given, top_k = settings[:, 0].long(), settings[:, 4].long()
    return sample(logits, given, numbers, top_k, draws, filtered=filtered)


def is_edited(sampling: SamplingMetadata) -> bool:
    """Whether a row is drawn from other logits than the model's."""
    return any(map(len, sampling.processed_rows))


def is_special(sampling: SamplingMetadata) -> bool:
    """Whether a row has what no kernel does, or there is none."""
    others = len(sampling.top_modes) + len(sampling.target_temperatures)
    return others > 0 or not sampling.num_rows


def _runs(sampling: SamplingMetadata) -> list[tuple[int, int]]:
    """Neighbouring rows of one kind: that the kernel draws, that it draws edited, and others."""
    kinds = np.zeros(sampling.num_rows, np.int8)
    for rows in sampling.processed_rows:
        kinds[rows] = 1
    kinds[: len(sampling.top_modes)][sampling.top_modes > 0] = 2
    tempered = sampling.target_temperatures != 1
    kinds[sampling.num_sampled :][: len(tempered)][tempered] = 2
    return neighbours(kinds)


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
