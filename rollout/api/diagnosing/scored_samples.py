"""What sampled tokens' logprobs tell, where all modules agree: head, sampler, or the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.api.diagnosing.layer_comparison import LayerComparison, Place
from rollout.generation import Completion, SamplingParams
from rollout.models.layers.base import storage_of
from rollout.weights import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSamples:
    """Of every sampled token: what the engine served, and what the trainer's logits make of it."""

    served: Tensor  # raw logprobs
    processed: Tensor
    kept: Tensor  # log of the kept mass
    raw: Tensor  # the trainer's
    tempered: Tensor  # the trainer's, at its temperature
    at_sampled: Tensor  # the trainer's, at the temperature of the samples
    rows: Tensor  # of the logits
    tokens: Tensor
    temperatures: tuple[float, float]  # of the samples, of the trainer

    @classmethod
    def of(
        cls,
        samples: Sequence[tuple[list[int], Completion]],
        logits: Tensor,
        params: SamplingParams,
        trainer_temperature: float | None,
    ) -> ScoredSamples:
        rows: list[int] = []
        tokens: list[int] = []
        start = 0
        for prompt, one in samples:
            first = start + len(prompt) - 1
            rows += range(first, first + len(one.token_ids))
            tokens += one.token_ids
            start += len(prompt) + len(one.token_ids)
        drawn = 1.0 if params.greedy else params.temperature
        theirs = drawn if trainer_temperature is None else trainer_temperature
        at, ids = torch.tensor(rows), torch.tensor(tokens)
        columns = [
            torch.tensor([p for _, one in samples for p in getattr(one.logprobs, name)])
            for name in ("raw", "processed", "log_kept_mass")
        ]
        return cls(
            served=columns[0],
            processed=columns[1],
            kept=columns[2],
            raw=_logprobs(logits, at, ids),
            tempered=_logprobs(logits / theirs, at, ids),
            at_sampled=_logprobs(logits / drawn, at, ids),
            rows=at,
            tokens=ids,
            temperatures=(drawn, theirs),
        )


def differs_by_head(comparison: LayerComparison, scored: ScoredSamples) -> Place | None:
    """Whether most of what is left comes of a head in another dtype than the other side's."""
    ours = comparison.ours
    here, there = ours.build.head_dtype or ours.build.dtype, comparison.theirs.logits_dtype
    if here == there:
        return None
    narrow, wide = _rebuilt_logits(comparison), _rebuilt_logits(comparison, wide=True)
    theirs = comparison.theirs.logits
    rounded = [_mean_gap(one, theirs, scored) for one in (narrow, wide)]
    worse, better = rounded if here != torch.float32 else rounded[::-1]
    if here != torch.float32 and better > 0.7 * worse:
        return None
    told = f"logits in {_name(here)} here and in {_name(there)} there"
    if here != torch.float32:
        told += f": a float32 head takes the mean difference from {worse:.3g} to {better:.3g}"
    return Place(kind="head", name="lm_head", difference=worse, noise=better, detail=told)


def differs_by_sampler(scored: ScoredSamples) -> Place | None:
    """Raw logprobs agree, and those that the samples were drawn by do not."""
    rounding = 3 * float((scored.served - scored.raw).abs().max()) + 1e-3
    gap = float((scored.processed - scored.tempered).abs().max())
    if gap <= rounding:
        return None
    drawn, theirs = scored.temperatures
    if drawn != theirs:
        detail = f"temperature: the trainer's logits are divided by {theirs:g}, samples were drawn "
        detail += f"at {drawn:g}"
    elif float((scored.processed + scored.kept - scored.at_sampled).abs().max()) <= rounding:
        share = float(scored.kept.exp().mean())
        detail = f"kept mass: filters (top_p, top_k, min_p) kept {share:.3f} of the mass on average"
        detail += ": add logprobs.log_kept_mass, or draw without filters"
    else:
        detail = "penalties, biases or masks of tokens that the trainer does not apply"
    return Place(kind="sampler", name="logprobs", difference=gap, noise=rounding, detail=detail)


def differs_by_engine(comparison: LayerComparison, scored: ScoredSamples) -> Place | None:
    """Whether the engine served what a fresh model of its weights does not give."""
    mine = _logprobs(_rebuilt_logits(comparison), scored.rows, scored.tokens)
    rounding = float((mine - scored.raw).abs().max())
    limit = 4 * rounding + (1e-3 if comparison.ours.build.dtype == torch.float32 else 0.1)
    gap = float((scored.served - mine).abs().max())
    if gap <= limit:
        return None
    return Place(
        kind="engine", name="logprobs", difference=gap, noise=limit,
        detail="a fresh model of the same weights gives other logprobs than the engine served",
    )  # fmt: skip


def _logprobs(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    return logits[rows].float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def _rebuilt_logits(comparison: LayerComparison, *, wide: bool = False) -> Tensor:
    """Of the whole forward pass; ``wide``: with the head's product in float32."""
    ours = comparison.ours
    hidden = ours.hidden_states(comparison.batch, comparison.pages)
    if not wide:
        return ours.logits(hidden)
    head, spec, config = ours.head, ours.head.specs["weight"], ours.config
    weight = spec.layout.read(storage_of(head, "weight"), spec.shape, Box.full(spec.shape))
    logits = hidden.float() @ weight.float().T * config.logits_scale
    if head.head_bias is not None:
        logits = logits + head.head_bias.float() * config.logits_scale
    if config.logits_softcap:
        logits = torch.tanh(logits / config.logits_softcap) * config.logits_softcap
    return logits[:, : ours.config.vocab_size]


def _mean_gap(logits: Tensor, theirs: Tensor, scored: ScoredSamples) -> float:
    mine = _logprobs(logits, scored.rows, scored.tokens)
    return float((mine - _logprobs(theirs, scored.rows, scored.tokens)).abs().mean())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
