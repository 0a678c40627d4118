"""Why logprobs of trainer and rollout differ: the first place that is more than rounding."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rollout.api.diagnosing.layer_comparison import LayerComparison, Place, TrainerRun
from rollout.api.diagnosing.model_pair import plain_model, rebuilt_model, tensors_of
from rollout.api.diagnosing.scored_samples import (
    ScoredSamples,
    differs_by_engine,
    differs_by_head,
    differs_by_sampler,
)
from rollout.api.sync_rollout import Rollout
from rollout.config import DEFAULT_TIMEOUT
from rollout.errors import ConfigError, some
from rollout.generation import Completion, SamplingParams
from rollout.kernels import digest
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weights import Box

PROMPT = 16  # tokens, drawn by chance
_LAYER = re.compile(r"((?:[^ ]+\.)?layers\.\d+)\.")
REMEDIES = {
    "weights": "send the trainer's weights in full (update_weights), and look at what it is that "
    "changes or leaves out the named tensors between the trainer's step and the update",
    "layers": "compare models of as many layers, all of which run: give the model whose weights "
    "the engine was sent, and look at num_hidden_layers on both sides",
    "embedding": "compare what embeddings are multiplied by, and how the vocabulary is padded",
    "norm": "give both sides the config's epsilon and dtype of norms (rms_norm_eps)",
    "rope": "give both sides the same rope_theta and rope scaling: the trainer's config, or "
    'hf_overrides={"rope_parameters": {"rope_theta": ...}} here',
    "attention": "compare the attention's scale, soft cap, window and mask; of transformers "
    'attn_implementation="eager" has them all',
    "mlp": "compare the activation and the order of gate and up",
    "router": "compute the router in float32 on both sides, or have the trainer follow the "
    "engine's choice of experts",
    "experts": "compare the activation, the weights of the chosen experts and their scaling",
    "block": "compare the order of norms and what residuals are multiplied by",
    "head": "give both sides the same head: its dtype (head_dtype=), soft cap, scale and bias",
    "sampler": "score with the temperature and the filters that the samples were drawn with",
    "engine": "if the service was started from a config.json other than the trainer's, say which: "
    "--checkpoint DIR (checkpoint=); else start a fresh engine of these weights, and if that "
    "agrees, compare its ranks, device, kernels and settings with this one's",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found. ``verdict``: the first place beyond rounding, None where there is none.

    ``places``: all that were compared, in the order of a forward pass. ``mean`` and ``largest``:
    of the difference between the raw logprobs that the engine served and the trainer's own, of
    ``tokens`` sampled tokens. ``flips``: tokens that went to other experts, over all layers, of
    equal inputs. ``rerouted``: of a mixture, how many of ``tokens`` the rollout had drawn by other
    experts than the trainer's own pass has, and how far their logprobs differ on average, and how
    far the others'; None where all were drawn by the same.
    """

    verdict: Place | None
    places: tuple[Place, ...] = ()
    mean: float = 0.0
    largest: float = 0.0
    tokens: int = 0
    flips: int = 0
    rerouted: tuple[int, float, float] | None = None
    version: int = 0

    @property
    def remedy(self) -> str:
        return "" if self.verdict is None else REMEDIES[self.verdict.kind]

    def lines(self) -> list[str]:
        lines = []
        if self.tokens:
            lines.append(
                f"logprobs of {self.tokens} sampled tokens: differ by {self.mean:.3g} on average, "
                f"{self.largest:.3g} at most (version {self.version})"
            )
        if self.places:
            lines.append(f"weights: equal; {len(self.places)} places compared")
        lines += _plot(self.places)
        if self.flips:
            lines.append(f"experts: {self.flips} choices of experts differ, near ties among them")
        if self.rerouted is not None:
            count, theirs, rest = self.rerouted
            lines.append(
                f"experts: the rollout drew {count} of {self.tokens} tokens by others than the "
                f"trainer has; those differ by {theirs:.3g} on average, the rest by {rest:.3g}"
            )
            lines.append("  the trainer can follow the rollout's: return_routed_experts, replayed")
        if self.verdict is None:
            return [*lines, "nothing differs beyond rounding"]
        first = self.verdict
        lines.append(f"first difference: {first.kind} at {first.name}: {first.detail}")
        return [*lines, f"remedy: {self.remedy}"]


def diagnose(
    engine: Rollout,
    reference: nn.Module | str | Path,
    *,
    checkpoint: str | Path | None = None,
    params: SamplingParams | None = None,
    trainer_temperature: float | None = None,
    sequences: int = 4,
    head_dtype: str = "auto",
    timeout: float = DEFAULT_TIMEOUT,
) -> Diagnosis:
    """Compare ``engine`` with ``reference``, a transformers model or the directory of one.

    Bytes first, by digest; then ``sequences`` samples drawn with ``params`` are teacher-forced
    through the reference and a model that is built here as the engine's is (one rank, on the CPU,
    in its dtype), module by module. ``checkpoint``: a directory with the engine's config.json
    (default: the reference's, or the engine's own where that is in this process).
    ``trainer_temperature``: by which the trainer divides its logits (default: the params').
    The engine says which of its settings decide what layers compute (``hf_overrides``,
    ``head_dtype`` ...); ``head_dtype`` is for one of a version that did not. ``ConfigError`` for
    models that run as foreign code, recurrent and quantised ones.
    """
    if sequences < 1:
        raise ConfigError(f"diagnose: sequences must be 1 or more, got {sequences}")
    if trainer_temperature is not None and not 0 < trainer_temperature < inf:
        raise ConfigError(
            f"diagnose: trainer_temperature must be above 0, got {trainer_temperature:g}"
        )
    if engine.server_info().task == "classify":
        raise ConfigError(
            "diagnose compares language models by tokens that they sample, and this one has a "
            "score head: check_weights compares its bytes, and classify its logits"
        )
    info = engine.weight_info()
    verdict = _weights(engine, reference, info, timeout)
    if verdict is not None:
        return Diagnosis(verdict=verdict, version=info.version)
    directory = _where(engine, reference, checkpoint)
    settings = json.loads(engine.server_info().settings or "{}")
    settings |= {} if head_dtype == "auto" else {"head_dtype": head_dtype}
    model = plain_model(reference, info.dtype)
    ours = rebuilt_model(directory, info, model, settings, timeout)
    params = params or SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True)
    params = replace(params, return_routed_experts=ours.config.moe is not None)
    samples = _samples(engine, ours.config.text_ids, params, sequences)
    ids = [prompt + one.token_ids for prompt, one in samples]
    theirs = TrainerRun(model, ids)
    comparison = LayerComparison(ours, theirs, ids)
    places = tuple(comparison.places())
    scored = ScoredSamples.of(samples, theirs.logits, params, trainer_temperature)
    verdict = next((place for place in places if place.differs), None)
    if verdict is None:
        verdict = (
            differs_by_head(comparison, scored)
            or differs_by_sampler(scored)
            or differs_by_engine(comparison, scored)
        )
    gaps = (scored.served - scored.raw).abs()
    return Diagnosis(
        verdict=verdict,
        places=places,
        mean=float(gaps.mean()),
        largest=float(gaps.max()),
        tokens=len(gaps),
        flips=comparison.flips,
        rerouted=_rerouted(comparison, [one for _, one in samples], scored, gaps),
        version=info.version,
    )


def _rerouted(
    comparison: LayerComparison, samples: Sequence[Completion], scored: ScoredSamples, gaps: Tensor
) -> tuple[int, float, float] | None:
    told = [one.routed_experts for one in samples if one.routed_experts is not None]
    if len(told) < len(samples):
        return None
    here = comparison.rerouted(told)[scored.rows]
    if not here.any():
        return None
    rest = gaps[~here]
    return int(here.sum()), float(gaps[here].mean()), float(rest.mean()) if len(rest) else 0.0


# ---- are the bytes equal? ----


def _weights(engine: Rollout, reference: Any, info: WeightInfo, timeout: float) -> Place | None:
    fit = engine.preflight(reference, timeout=timeout)
    if (other := _of_one_side(fit.problems, info)) is not None:
        return other
    if fit.problems:
        return _of_weights(fit.problems, "names or shapes do not fit")
    report = engine.check_weights(reference, timeout=timeout)
    found = (*report.differing, *report.problems)
    if not found:
        return None
    return _of_weights(found, _pattern(engine, reference, info, report.differing, timeout))


def _of_one_side(problems: Sequence[str], info: WeightInfo) -> Place | None:
    """Whole layers that are in the engine alone, or in the reference alone, if there are any."""
    held: dict[str, set[str]] = defaultdict(set)
    for meta in info.tensors:
        if found := _LAYER.match(meta.name):
            held[found[1]].add(meta.name)
    missing = {one.removesuffix(" is missing") for one in problems}
    lacks = [layer for layer, names in held.items() if names <= missing]
    unknown = (_LAYER.match(one) for one in problems if " is unknown" in one)
    more = list(dict.fromkeys(found[1] for found in unknown if found and found[1] not in held))
    sides = (("engine", lacks), ("reference", more))
    told = [f"the {side} alone has {some(layers)}" for side, layers in sides if layers]
    if not told or len(lacks) == len(held):  # where all are unknown their names are at fault
        return None
    return Place(
        kind="layers", name=(lacks or more)[0], difference=float("inf"), noise=0.0,
        detail=f"{', and '.join(told)}; nothing was compared",
    )  # fmt: skip


def _of_weights(found: Sequence[str], what: str) -> Place:
    told = f"{len(found)} tensors: {some(found, 4)}"
    return Place(
        kind="weights", name=found[0], difference=float("inf"), noise=0.0,
        detail=f"{told}; {what}" if what else told,
    )  # fmt: skip


def _pattern(
    engine: Rollout, reference: Any, info: WeightInfo, differing: Sequence[str], timeout: float
) -> str:
    """What the differing tensors have in common, where that can be told."""
    tied = [name for name in differing if name in info.aliases]
    if tied and len(tied) == len(differing):
        return (
            f"{tied[0]} is tied to {info.aliases[tied[0]]} here, and the trainer's holds other "
            "values: it was not updated with it, or untied"
        )
    values = {n: value for n, value in tensors_of(reference, info, timeout) if n in differing}
    mine = {
        name: digest(value.contiguous(), tuple(value.shape), Box.full(tuple(value.shape)))
        for name, value in values.items()
    }
    live = engine._async.backend.digests(timeout)
    for a in differing:
        for b in differing:
            if a < b and mine.get(a) == live.get(b) and mine.get(b) == live.get(a):
                return f"{a} and {b} are in each other's places"
    zero = [name for name, value in values.items() if not value.any()]
    return f"the trainer's {zero[0]} is all zeros" if zero else ""


# ---- the two stacks ----


def _where(engine: Rollout, reference: Any, checkpoint: str | Path | None) -> Path:
    """The directory of the engine's config."""
    served = engine._async.backend.served
    if served is not None:
        checkpoint = checkpoint or served.directory
    if checkpoint is None and isinstance(reference, str | Path):
        checkpoint = reference
    if checkpoint is None:
        raise ConfigError(
            "diagnose: the engine is elsewhere; give checkpoint=, a directory with its config.json"
        )
    return Path(checkpoint)


def _samples(
    engine: Rollout, known: Sequence[int], params: SamplingParams, count: int
) -> list[tuple[list[int], Completion]]:
    drawn = random.Random(0)
    prompts = [drawn.choices(known, k=PROMPT) for _ in range(count)]
    outputs = engine.generate(prompts, params)
    found = [(o.prompt_token_ids, one) for o in outputs for one in o.outputs if one.token_ids]
    if not found:
        raise ConfigError("diagnose: the engine gave no tokens by these sampling parameters")
    return found


def _plot(places: Sequence[Place]) -> list[str]:
    """A bar for each place that differs, and the largest of those that do not."""
    shown = [place for place in places if place.differs][:8]
    if not shown and places:
        shown = [max(places, key=lambda place: place.difference / max(place.noise, 1e-20))]
    width = max((len(place.name) for place in shown), default=0)
    lines = []
    for place in shown:
        times = place.difference / max(place.noise, 1e-20)
        bar = "#" * max(1, min(40, round(8 * times))) if times < 5 else "#" * 40
        told = f"{place.difference:.2e}, {times:.2g} x rounding"
        lines.append(f"  {place.name:<{width}} {bar} {told}")
    return lines
