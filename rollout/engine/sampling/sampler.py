"""Turns logits into tokens and their logprobs, each row by itself.

A row's result is a function of its logits and settings alone: every reduction runs along the
vocabulary in an order that other rows cannot change, and the draw comes from a counter.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.memory import to_device
from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.sampling.metadata import (
    MIN_P,
    TEMPERATURE,
    TOP_P,
    SamplingMetadata,
    process_logits,
)
from rollout.generation import GREEDY_BELOW, TOP_MODES
from rollout.kernels import filter_logits, scan_logits
from rollout.kernels.scan_logits import SEGMENT

CPU_SLICE = 4 << 20  # elements of edited logits worked on at a time: they stay in the caches
GPU_SLICE = 256 << 20
PROCESSED = TOP_MODES.index("processed")


class Sampler:
    """Draws and scores; keeps a work area of bounded size between steps.

    Order: grammars, allowed_token_ids, edits (min_tokens, bad words, logit_bias), penalties,
    temperature, min_p, top_k, top_p, draw.
    Tokens that tie with the last kept one at a filter's edge are kept with it. A greedy row takes
    the argmax after edits and penalties; its ``processed`` is the log-softmax there at temperature
    1, its ``log_kept_mass`` 0.
    """

    def __init__(self) -> None:
        self._area: Tensor | None = None

    def sample(self, logits: Tensor, sampling: SamplingMetadata) -> SamplerOutput:
        """``logits``: [R, vocabulary], any float dtype; computed in float32. Not changed."""
        parts = []
        for start, stop, edited in _runs(sampling):
            if not edited:
                parts.append(_sample(logits[start:stop], sampling.rows(start, stop), None))
                continue
            for first, last in slices(logits, start, stop):
                part, rows = logits[first:last], sampling.rows(first, last)
                values = self.copy(part)
                process_logits(values, rows)
                parts.append(_sample(part, rows, values))
        return SamplerOutput.cat(parts)

    def copy(self, logits: Tensor) -> Tensor:
        """Float32 in a kept area: fresh pages would cost more than the arithmetic."""
        if self._area is None or self._area.numel() < logits.numel():
            self._area = torch.empty(logits.numel(), device=logits.device)
        return self._area[: logits.numel()].view(logits.shape).copy_(logits)


def slices(logits: Tensor, start: int, stop: int) -> list[tuple[int, int]]:
    """Rows ``start <= row < stop`` in parts that a work area holds: (first, end)."""
    step = max(1, _slice_of(logits.device) // logits.shape[1])
    return [(first, min(first + step, stop)) for first in range(start, stop, step)]


def _slice_of(device: torch.device) -> int:
    return CPU_SLICE if device.type == "cpu" else GPU_SLICE


@dataclass(frozen=True, slots=True)
class _Scan:
    """What ``scan_logits`` gives of rows, and the log of their sum of exponentials, float64."""

    best: Tensor
    ids: Tensor
    sums: Tensor
    mass: Tensor
    lse: Tensor

    @classmethod
    def of(cls, logits: Tensor, temperature: Tensor | None = None) -> _Scan:
        best, ids, sums, mass = scan_logits(logits, temperature)
        return cls(best, ids, sums, mass, best.double() + mass.log())

    def first(self, count: int) -> _Scan:
        if count == len(self.best):
            return self
        parts = (self.best, self.ids, self.sums, self.mass, self.lse)
        return _Scan(*(part[:count] for part in parts))

    def scores(self, logits: Tensor, tokens: Tensor, scale: Tensor | None = None) -> Tensor:
        """Log-softmax of ``logits``, whose scan at temperatures ``scale`` [R] this is, at a token
        of each row; float64.
        """
        return _scaled(logits.gather(1, tokens[:, None])[:, 0], scale).double() - self.lse


def _runs(sampling: SamplingMetadata) -> list[tuple[int, int, bool]]:
    """Neighbouring rows that all have edits or penalties, or all not: (first, end, edited).

    Rows that score have none.
    """
    edited = np.zeros(sampling.num_rows, dtype=bool)
    for rows in sampling.processed_rows:
        edited[rows] = True
    return [(a, b, bool(edited[a])) for a, b in neighbours(edited)] or [(0, 0, False)]


def neighbours(kinds: NDArray[Any]) -> list[tuple[int, int]]:
    """Rows of one kind that stand together: (first, end)."""
    edges = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), len(kinds)]
    return [(first, end) for first, end in pairwise(edges) if first < end]


def _sample(logits: Tensor, sampling: SamplingMetadata, values: Tensor | None) -> SamplerOutput:
    """``values``: the logits that tokens are drawn from, where those are not the model's own."""
    count, device = sampling.num_sampled, logits.device
    given = sampling.scan_temperatures
    scale = None if given is None else torch.from_numpy(given).to(device)
    raw = _Scan.of(logits, scale)
    source = logits[:count] if values is None else values[:count]
    scan = raw.first(count) if values is None else _Scan.of(source)
    tokens, processed, log_kept, kept, own_top = _draw(source, scan, sampling)
    targets = torch.from_numpy(sampling.targets).to(device)
    chosen = torch.cat([tokens, targets]) if len(targets) else tokens
    scores = raw.scores(logits, chosen, scale)
    if processed is None:
        processed = scores[:count] if values is None else scan.scores(source, tokens)
    num_top = sampling.num_top
    if own_top is not None:
        rows = np.flatnonzero(sampling.top_modes)
        num_top = num_top.copy()
        num_top[rows] = 0
    top = alternatives(logits, raw.lse, num_top, sampling.most_top, scale)
    if own_top is not None:
        where = torch.from_numpy(rows).to(device)
        for column, own in zip(top, own_top, strict=True):
            column[where] = own[where]
    return SamplerOutput(chosen, scores.float(), processed.float(), log_kept.float(), *top, **kept)


def _draw(
    values: Tensor, scan: _Scan, sampling: SamplingMetadata
) -> tuple[Tensor, Tensor | None, Tensor, dict[str, Tensor], tuple[Tensor, Tensor] | None]:
    """Tokens int64, their processed logprobs and the logs of the kept mass float64, all [S]; what
    was left of the rows that ask; and ``alternatives`` of those whose mode is not raw.

    No logprobs where neither temperature nor filter changed them: they are those of ``scan``.
    """
    device, temperature = values.device, sampling.numbers[:, TEMPERATURE]
    greedy = temperature < GREEDY_BELOW
    scale, edges = None, None
    if (~greedy & (temperature != 1)).any():
        scale = torch.from_numpy(np.where(greedy, np.float32(1), temperature)).to(device)
        scan = _Scan.of(values, scale)
    tokens, log_kept = scan.ids, torch.zeros_like(scan.mass)
    if not greedy.all():
        sums = scan.sums
        if (_filters(sampling, values.shape[1]) & ~greedy).any():
            edges, sums, mass = _filter(values, scale, scan, greedy, sampling)
            log_kept = (mass / scan.mass).log().clamp_max(0.0)
        draws = torch.from_numpy(uniforms(sampling.seeds, sampling.counters)).to(device)
        drawn = draw_logits(values, scale, edges, scan.best, sums.double(), draws)
        tokens = torch.where(torch.from_numpy(greedy).to(device), tokens, drawn)
    asking = sampling.kept_rows
    kept = kept_sets(values, edges, asking, scale) if len(asking) else {}
    own_top = None
    if len(modes := sampling.top_modes):
        filtered = torch.from_numpy(modes == PROCESSED).to(device)
        own_top = alternatives(
            values,
            scan.lse + torch.where(filtered, log_kept, 0),
            np.where(modes > 0, sampling.num_top[: len(modes)], 0),
            sampling.most_top,
            scale,
            None if edges is None else torch.where(filtered, edges, float("-inf")),
        )
    if scale is None and edges is None:
        return tokens, None, log_kept, kept, own_top
    scores = values.gather(1, tokens[:, None])[:, 0].float()
    if scale is not None:
        scores = scores / scale
    # Both sums round: of a token that is alone the difference may be above 0 by an epsilon.
    processed = (scores.double() - scan.lse - log_kept).clamp_max(0.0)
    return tokens, processed, log_kept, kept, own_top


def kept_sets(
    values: Tensor, edges: Tensor | None, kept_rows: NDArray[np.int64], scale: Tensor | None = None
) -> dict[str, Tensor]:
    """``SamplerOutput.kept_counts`` and ``kept_ids`` of ``kept_rows``: what may be drawn.

    ``edges`` [S]: the least of ``values``, at temperatures ``scale``, that filters left.
    """
    counts, ids = [], []
    asking = to_device(torch.from_numpy(kept_rows), values.device)
    for rows in torch.split(asking, max(1, _slice_of(values.device) // values.shape[1])):
        x = _scaled(values[rows].float(), None if scale is None else scale[rows, None])
        left = x > float("-inf")
        if edges is not None:
            left &= x >= edges[rows, None]
        count = left.sum(-1)
        count = torch.where(count == left.shape[1], 0, count)
        left &= count[:, None] > 0
        counts.append(count.int())
        ids.append(left.nonzero()[:, 1].int())
    return {"kept_counts": torch.cat(counts), "kept_ids": torch.cat(ids)}


def _filter(
    values: Tensor,
    scale: Tensor | None,
    scan: _Scan,
    greedy: NDArray[np.bool_],
    sampling: SamplingMetadata,
) -> tuple[Tensor, Tensor, Tensor]:
    """``filter_logits`` of rows, of which the greedy ones keep everything."""
    settings = (
        torch.from_numpy(np.where(greedy, off, column)).to(values.device)
        for off, column in (
            (np.int64(0), sampling.top_k),
            (np.float64(1), sampling.numbers[:, TOP_P].astype(np.float64)),
            (np.float32(0), sampling.numbers[:, MIN_P]),
        )
    )
    return filter_logits(values, scale, scan.best, scan.sums, scan.mass, *settings)


def _filters(sampling: SamplingMetadata, vocab: int) -> NDArray[np.bool_]:
    top_k = (sampling.top_k > 0) & (sampling.top_k < vocab)
    return top_k | (sampling.numbers[:, TOP_P] < 1) | (sampling.numbers[:, MIN_P] > 0)


def _scaled(values: Tensor, scale: Tensor | None) -> Tensor:
    """Logits at temperatures, as ``scan_logits`` takes them."""
    return values if scale is None else values.float() / scale


def alternatives(
    logits: Tensor,
    lse: Tensor,
    num_top: NDArray[np.int64],
    most: int,
    scale: Tensor | None = None,
    edges: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``scale`` [R]: the temperatures at which ``lse`` is; their order is the logits' own.

    ``most``: how many columns, where the vocabulary has them. ``edges`` [R]: what lies below, at
    those temperatures, has minus infinity.
    """
    count = min(most, logits.shape[1])
    ids = torch.zeros(len(logits), count, dtype=torch.int32, device=logits.device)
    logprobs = torch.zeros(len(logits), count, device=logits.device)
    if not count:
        return ids, logprobs
    step = max(1, _slice_of(logits.device) // logits.shape[1])
    for rows in np.split(np.flatnonzero(num_top > 0), range(step, len(num_top), step)):
        where = to_device(torch.from_numpy(rows), logits.device)
        values = logits[where].float()
        found = _top_ids(values, count)
        best = _scaled(values.gather(1, found), None if scale is None else scale[where, None])
        if edges is not None:
            best = best.masked_fill(best < edges[where, None], float("-inf"))
        ids[where] = found.int()
        logprobs[where] = (best.double() - lse[where, None]).float()
    return ids, logprobs


def _top_ids(values: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` largest, the lower first of a tie: topk alone picks by the sampling."""
    bits = values.contiguous().view(torch.int32).long()
    rank = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # ascends with the value
    vocab = values.shape[1]
    keys = (rank << 32) + (vocab - torch.arange(vocab, device=values.device))
    return vocab - (torch.topk(keys, count, dim=-1).values & 0xFFFFFFFF)


def draw_logits(
    logits: Tensor,
    temperature: Tensor | None,
    edges: Tensor | None,
    best: Tensor,
    sums: Tensor,
    draws: Tensor,
) -> Tensor:
    """Invert each row's cumulative sum, in vocabulary order, at ``draws`` in [0, 1): int64 [R].

    It is that of ``exp(x - best)``, ``x = logits / temperature``, over the x from ``edges`` [R] up;
    ``best`` and ``sums`` (here float64) as ``scan_logits`` or ``filter_logits`` gives them. A token
    of probability 0 is never drawn.
    """
    segment, target = _find_segment(sums, draws)
    inside, valid = _segments(logits, segment)
    inside = inside.float()
    if temperature is not None:
        inside = inside / temperature[:, None]
    if edges is not None:
        valid = valid & (inside >= edges[:, None])
    weights = (inside - best[:, None]).exp().double() * valid
    return _find_inside(weights, segment, target, logits.shape[1])


def _find_segment(sums: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """The segment of each row that a draw falls into, and how far into it."""
    cumulative = sums.cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(draws * total, _below(total))
    segment = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    segment.clamp_(max=sums.shape[1] - 1)  # only rows of NaN reach it
    before = (cumulative - sums).gather(1, segment[:, None])[:, 0]
    return segment, target - before


def _find_inside(weights: Tensor, segment: Tensor, target: Tensor, vocab: int) -> Tensor:
    steps = weights.cumsum(-1)
    # The float32 sum of a segment and this float64 one differ in the last bits.
    target = torch.minimum(target.clamp_min(0.0), _below(steps[:, -1]))
    found = torch.searchsorted(steps, target[:, None], right=True)[:, 0]
    return (segment * SEGMENT + found).clamp_(max=vocab - 1)


def _segments(values: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """One segment of each row [R, SEGMENT], past the end repeating the last; and which are real."""
    index = segment[:, None] * SEGMENT + torch.arange(SEGMENT, device=values.device)
    last = values.shape[1] - 1
    return values.gather(1, index.clamp(max=last)), index <= last


def _below(values: Tensor) -> Tensor:
    return values * (1.0 - 2.0**-53)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, position), both int64 [n].

    Two rounds of splitmix64's finaliser (Steele, Lea, Flood 2014): one spreads the seed, one the
    position counted from there, so neighbouring seeds and positions give unrelated numbers.
    """
    with np.errstate(over="ignore"):  # arithmetic is modulo 2^64
        state = _mix(seeds.astype(np.uint64) + _GOLDEN)
        state = _mix(state + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    bits: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64)
    return bits * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return out
