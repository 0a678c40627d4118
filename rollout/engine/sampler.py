"""Turns logits into tokens and their logprobs, each row by itself.

A row's result is a function of its logits and settings alone: every reduction runs along the
vocabulary in an order that other rows cannot change, and the draw comes from a counter.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.logit_edits import apply_edits, apply_penalties
from rollout.engine.nucleus import nucleus_edge, nucleus_edges
from rollout.engine.sampling_batch import MIN_P, TEMPERATURE, TOP_P, SamplingBatch
from rollout.engine.uniforms import uniforms
from rollout.engine.vocab_scan import argmax_rows, draw_logits, draw_rows, segment_sums
from rollout.generation import GREEDY_BELOW
from rollout.kernels import scan_logits

CPU_SLICE = 4 << 20  # elements of logits worked on at a time: they stay in the caches
GPU_SLICE = 256 << 20
SORT_WHOLE = 4096  # vocabularies up to here are sorted for top_p in one call


@dataclass(frozen=True, slots=True)
class Samples:
    """Results of all rows, on the CPU; the first ``S`` rows drew their token.

    ``top_ids`` and ``top_logprobs`` are [R, k], k the largest number asked for, by raw logprob.
    """

    tokens: Tensor  # [R] int64
    raw: Tensor  # [R] float32
    processed: Tensor  # [S] float32
    log_kept_mass: Tensor  # [S] float32
    top_ids: Tensor  # [R, k] int32
    top_logprobs: Tensor  # [R, k] float32


class Sampler:
    """Draws and scores; keeps a few work areas of bounded size between steps.

    Order: edits (min_tokens, logit_bias), penalties, temperature, min_p, top_k, top_p, draw.
    Tokens that tie with the last kept one at a filter's edge are kept with it. A greedy row takes
    the argmax after edits and penalties; its ``processed`` is the log-softmax there at temperature
    1, its ``log_kept_mass`` 0.
    """

    def __init__(self) -> None:
        self._areas: list[Tensor] = []

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Samples:
        """``logits``: [R, vocabulary], any float dtype; computed in float32. Not changed."""
        vocab, parts = logits.shape[1], []
        for start, stop, plain in _runs(batch, vocab):
            if plain:
                parts.append(_sample_plain(logits[start:stop], batch.rows(start, stop)))
            else:
                parts += self._sample_slices(logits, batch, start, stop)
        return _join(parts)

    def _sample_slices(
        self, logits: Tensor, batch: SamplingBatch, start: int, stop: int
    ) -> list[Samples]:
        """Rows start .. stop by way of float32 copies of a few rows at a time."""
        limit = CPU_SLICE if logits.device.type == "cpu" else GPU_SLICE
        step = max(1, limit // logits.shape[1])
        parts = []
        for first in range(start, stop, step):
            last = min(first + step, stop)
            part = logits[first:last]
            if part.dtype != torch.float32:
                part = self._area(2, part).copy_(part)
            parts.append(self._sample(part, batch.rows(first, last)))
        return parts

    def _sample(self, logits: Tensor, batch: SamplingBatch) -> Samples:
        count = batch.num_sampled
        probs = self._area(0, logits)
        torch.softmax(logits, -1, out=probs)
        best, best_ids = argmax_rows(logits)
        raw_lse = _lse(best, best_ids, probs)
        drawn = _Drawn.nothing(logits.device)
        if count:
            values, lse = logits[:count], raw_lse[:count]
            if _changes(batch):
                values = self._area(1, logits)[:count].copy_(logits[:count])
                _edit(values, batch)
                probs = self._area(0, values)
                torch.softmax(values, -1, out=probs)
                best, best_ids = argmax_rows(values)
                lse = _lse(best, best_ids, probs)
            drawn = _draw(values, probs[:count], lse, best_ids[:count], batch)
        targets = torch.from_numpy(batch.targets).to(logits.device)
        tokens = torch.cat([drawn.tokens, targets])
        raw = logits.gather(1, tokens[:, None])[:, 0].double() - raw_lse
        top_ids, top_logprobs = _alternatives(logits, raw_lse, batch.num_top)
        return Samples(
            tokens.cpu(),
            raw.float().cpu(),
            drawn.processed.float().cpu(),
            drawn.log_kept_mass.float().cpu(),
            top_ids.cpu(),
            top_logprobs.cpu(),
        )

    def _area(self, index: int, like: Tensor) -> Tensor:
        """A work area shaped like ``like``: fresh pages would cost more than the arithmetic."""
        while len(self._areas) <= index:
            self._areas.append(torch.empty(0, device=like.device))
        if self._areas[index].numel() < like.numel():
            self._areas[index] = torch.empty(like.numel(), device=like.device)
        return self._areas[index][: like.numel()].view(like.shape)


@dataclass(frozen=True, slots=True)
class _Drawn:
    tokens: Tensor  # [S] int64
    processed: Tensor  # [S] float64
    log_kept_mass: Tensor  # [S] float64

    @classmethod
    def nothing(cls, device: torch.device) -> _Drawn:
        empty = torch.empty(0, dtype=torch.float64, device=device)
        return cls(torch.empty(0, dtype=torch.int64, device=device), empty, empty)


def _runs(batch: SamplingBatch, vocab: int) -> list[tuple[int, int, bool]]:
    """Neighbouring rows that are all plain, or all not: (first, end, plain).

    Plain rows need no edit, penalty or filter; they score, are greedy, or draw at a temperature.
    """
    plain = np.ones(batch.num_rows, dtype=bool)
    greedy = batch.numbers[:, TEMPERATURE] < GREEDY_BELOW
    plain[: batch.num_sampled] = greedy | ~_filters(batch, vocab)
    plain[batch.edit_rows] = False
    plain[batch.history_rows] = False
    edges = [0, *(np.flatnonzero(plain[1:] != plain[:-1]) + 1).tolist(), len(plain)]
    return [(a, b, bool(plain[a])) for a, b in pairwise(edges) if a < b] or [(0, 0, True)]


def _sample_plain(logits: Tensor, batch: SamplingBatch) -> Samples:
    """Rows that sample from their logits as they are, or divided by a temperature."""
    count, device = batch.num_sampled, logits.device
    best, best_ids, sums, mass = scan_logits(logits)
    raw_lse = best.double() + mass.log()
    temperature = batch.numbers[:, TEMPERATURE]
    greedy = temperature < GREEDY_BELOW
    tokens, lse, scale = best_ids[:count], raw_lse[:count], None
    if not greedy.all():
        best, sums, mass = best[:count], sums[:count], mass[:count]
        if (~greedy & (temperature != 1)).any():
            scale = torch.from_numpy(np.where(greedy, np.float32(1), temperature)).to(device)
            best, _, sums, mass = scan_logits(logits[:count], scale)
            lse = best.double() + mass.log()
        draws = torch.from_numpy(uniforms(batch.seeds, batch.counters)).to(device)
        drawn = draw_logits(logits[:count], scale, best, sums.double(), draws)
        tokens = torch.where(torch.from_numpy(greedy).to(device), tokens, drawn)
    chosen = torch.cat([tokens, torch.from_numpy(batch.targets).to(device)])
    values = logits.gather(1, chosen[:, None])[:, 0].float()
    processed = values[:count] if scale is None else values[:count] / scale
    top_ids, top_logprobs = _alternatives(logits, raw_lse, batch.num_top)
    return Samples(
        chosen.cpu(),
        (values.double() - raw_lse).float().cpu(),
        (processed.double() - lse).float().cpu(),
        torch.zeros(count),
        top_ids.cpu(),
        top_logprobs.cpu(),
    )


def _draw(
    values: Tensor, probs: Tensor, lse: Tensor, best_ids: Tensor, batch: SamplingBatch
) -> _Drawn:
    """Filter ``probs`` in place and draw; ``values``: the logits they are the softmax of."""
    greedy = batch.numbers[:, TEMPERATURE] < GREEDY_BELOW
    log_kept = torch.zeros(len(probs), dtype=torch.float64, device=probs.device)
    tokens = best_ids
    if not greedy.all():
        sums = segment_sums(probs)
        filtered = np.flatnonzero(_filters(batch, probs.shape[1]) & ~greedy)
        if len(filtered):
            where = torch.from_numpy(filtered).to(probs.device)
            before = sums[where].sum(-1)
            _filter(values, probs, where, filtered, batch)
            sums[where] = segment_sums(probs[where])
            log_kept[where] = (sums[where].sum(-1) / before).log().clamp_max(0.0)
        draws = torch.from_numpy(uniforms(batch.seeds, batch.counters)).to(probs.device)
        tokens = draw_rows(probs, sums, draws)
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(probs.device), best_ids, tokens)
    processed = values.gather(1, tokens[:, None])[:, 0].double() - lse - log_kept
    return _Drawn(tokens, processed, log_kept)


def _changes(batch: SamplingBatch) -> bool:
    """Whether any row samples from something else than the model's logits as they are."""
    temperature = batch.numbers[:, TEMPERATURE]
    scaled = (temperature != 1) & (temperature >= GREEDY_BELOW)
    return bool(scaled.any() or len(batch.edit_rows) or len(batch.history_rows))


def _edit(values: Tensor, batch: SamplingBatch) -> None:
    """Edits, penalties and temperature, in place on [S, vocabulary] float32."""
    apply_edits(values, batch)
    apply_penalties(values, batch)
    temperature = batch.numbers[:, TEMPERATURE]
    if (temperature != 1).any():
        scale = np.where(temperature < GREEDY_BELOW, np.float32(1), temperature)
        values.div_(torch.from_numpy(scale).to(values.device)[:, None])


def _filters(batch: SamplingBatch, vocab: int) -> NDArray[np.bool_]:
    top_k = (batch.top_k > 0) & (batch.top_k < vocab)
    return top_k | (batch.numbers[:, TOP_P] < 1) | (batch.numbers[:, MIN_P] > 0)


def _filter(
    values: Tensor, probs: Tensor, where: Tensor, rows: NDArray[np.int64], batch: SamplingBatch
) -> None:
    """Zero the probabilities that min_p, top_k and top_p drop, in place, in ``rows`` only."""
    device = probs.device
    part = probs[where]
    min_p = torch.from_numpy(batch.numbers[rows, MIN_P]).to(device)
    part.masked_fill_(part < (min_p * part.amax(-1))[:, None], 0.0)
    limits = batch.top_k[rows]
    limited = np.flatnonzero((limits > 0) & (limits < probs.shape[1]))
    if len(limited):
        which = torch.from_numpy(limited).to(device)
        scores = values[where[which]]
        largest = torch.topk(scores, int(limits[limited].max()), dim=-1).values
        last = torch.from_numpy(limits[limited] - 1).to(device)
        part[which] = part[which].masked_fill(scores < largest.gather(1, last[:, None]), 0.0)
    top_p = batch.numbers[rows, TOP_P].astype(np.float64)
    nuclei = np.flatnonzero(top_p < 1)
    if device.type == "cpu" and probs.shape[1] > SORT_WHOLE:
        for row in nuclei:
            edge = nucleus_edge(part[row].numpy(), float(top_p[row]))
            part[row].masked_fill_(part[row] < edge, 0.0)
    elif len(nuclei):
        chosen = torch.from_numpy(nuclei).to(device)
        kept = part[chosen]
        edges = nucleus_edges(kept, torch.from_numpy(top_p[nuclei]).to(device))
        part[chosen] = kept.masked_fill_(kept < edges, 0.0)
    probs[where] = part


def _lse(best: Tensor, best_ids: Tensor, probs: Tensor) -> Tensor:
    """Log of the sum of exponentials, float64 [R]: softmax holds it at the most likely token."""
    return best.double() - probs.gather(1, best_ids[:, None])[:, 0].double().log()


def _alternatives(logits: Tensor, lse: Tensor, num_top: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    count = min(int(num_top.max(initial=0)), logits.shape[1])
    ids = torch.zeros(len(logits), count, dtype=torch.int32, device=logits.device)
    logprobs = torch.zeros(len(logits), count, device=logits.device)
    if count:
        where = torch.from_numpy(np.flatnonzero(num_top > 0)).to(logits.device)
        values = logits[where].float()
        found = _top_ids(values, count)
        values = values.gather(1, found)
        ids[where] = found.int()
        logprobs[where] = (values.double() - lse[where, None]).float()
    return ids, logprobs


def _top_ids(values: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` largest, the lower first of a tie: topk alone picks by the batch."""
    bits = values.contiguous().view(torch.int32).long()
    rank = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # ascends with the value
    vocab = values.shape[1]
    keys = (rank << 32) + (vocab - torch.arange(vocab, device=values.device))
    return vocab - (torch.topk(keys, count, dim=-1).values & 0xFFFFFFFF)


def _join(parts: list[Samples]) -> Samples:
    if len(parts) == 1:
        return parts[0]
    width = max((p.top_ids.shape[1] for p in parts), default=0)

    def wide(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))

    return Samples(
        torch.cat([p.tokens for p in parts]),
        torch.cat([p.raw for p in parts]),
        torch.cat([p.processed for p in parts]),
        torch.cat([p.log_kept_mass for p in parts]),
        torch.cat([wide(p.top_ids) for p in parts]),
        torch.cat([wide(p.top_logprobs) for p in parts]),
    )
