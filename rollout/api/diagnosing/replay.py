"""Run a request of a journal again, and say whether the same tokens come, or why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollout.api.async_rollout import AsyncRollout
from rollout.api.diagnosing.layer_search import find_layer
from rollout.api.embedded import EmbeddedBackend
from rollout.api.sync_rollout import Rollout
from rollout.config import EngineConfig
from rollout.engine.facts import differing_facts, engine_facts, layer_settings
from rollout.engine.requests.journal import JournaledRequest, JournaledSample, find_request
from rollout.errors import ConfigError, EngineError
from rollout.generation import Completion, SamplingParams
from rollout.weight_sync.protocol.messages import WeightInfo

# Settings that are not taken over: where things were, and what a replay has no use of.
_LEFT_OUT = (
    *("journal", "journal_bytes", "weight_dirs", "served_model_name", "components", "executor"),
    *("ray_address", "ray_placement_group"),
    *("undo", "staging", "max_staleness", "on_stale", "max_adapters", "progress"),
    *("max_cpu_loras", "lora_embeddings", "lora_experts"),
    *("trace_load", "max_parallel_loading_workers", "worker_extension_cls"),
)
_OF_ADAPTERS = ("lora_embeddings", "lora_experts")  # are, where there is one again
_NAMED = 8  # tensors that a line names
ADAPTER = "adapter "  # what differs, in the place of a tensor's name
_SIGNED = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReplay:
    """One sample: ``compared`` of its ``recorded`` tokens were run again, from the first on.

    ``first_difference``: the position of the first token that is another, and the two; None where
    all are the same. ``logprob_difference``: the largest, of the same tokens' raw logprobs; 0.0 is
    the same bits. ``recorded_logprobs``: of the recorded token there, as it was and as it is here.
    """

    index: int
    recorded: int
    compared: int
    first_difference: tuple[int, int | None, int | None] | None
    logprob_difference: float
    note: str = ""
    recorded_logprobs: tuple[float, float] | None = None

    @property
    def same(self) -> bool:
        """Whether tokens were run again, where it has any, and all are the same."""
        return self.first_difference is None and bool(self.compared or not self.recorded)

    def __str__(self) -> str:
        if self.first_difference is not None:
            at, then, now = self.first_difference
            text = f"token {at} differs: {_token(then)} then, {_token(now)} now"
            if self.recorded_logprobs is not None:
                was, here = self.recorded_logprobs
                text += f" (logprob of {_token(then)}: {was:.6g} then, {here:.6g} here)"
        elif not self.same:
            text = f"none of {self.recorded} tokens was run again"
        else:
            bits = "bit for bit" if not self.logprob_difference else "the same tokens"
            text = f"{self.compared} of {self.recorded} tokens again: {bits}"
        if self.logprob_difference:
            text += f"; logprobs before it differ by at most {self.logprob_difference:.3g}"
        return f"sample {self.index}: {text}" + (f"; {self.note}" if self.note else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What came of a replay. ``weights``: what the live weights are to those of the record;
    ``differing``: the tensors that differ, in the order of a forward pass; ``settings``: a line for
    each that may change bits; ``layers``: what a comparison of layers found, where there was one.
    """

    request_id: str
    samples: tuple[SampleReplay, ...]
    weights: str
    differing: tuple[str, ...]
    settings: tuple[str, ...]
    deterministic: bool
    layers: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return all(sample.same for sample in self.samples)

    def lines(self) -> list[str]:
        lines = [f"request {self.request_id}", f"weights: {self.weights}"]
        lines += [f"  {name}" for name in self.differing[:_NAMED]]
        if len(self.differing) > _NAMED:
            lines.append(f"  and {len(self.differing) - _NAMED} more")
        lines += [f"setting differs: {line}" for line in self.settings] or ["settings: the same"]
        lines += [str(sample) for sample in self.samples]
        lines += self.layers
        if not self.same:
            lines.append(f"because: {self._because()}")
        return lines

    def _because(self) -> str:
        if all(sample.first_difference is None for sample in self.samples):
            return "what versions with other weights computed cannot be run again by these"
        if self.differing and self.differing[0].startswith(ADAPTER):
            return (
                "the adapter is another than the one that the tokens came from: give the directory "
                "of that version with --adapter"
            )
        if self.differing:
            return (
                "the weights are others than those that the tokens came from, first in "
                f"{_layer_of(self.differing[0])}: give the checkpoint of that version with "
                "--checkpoint"
            )
        if any(line.startswith("layer: ") for line in self.layers):
            return "what a layer computes here is not what its weights say, see above"
        if self.settings:
            return "settings that decide bits are others, see above"
        if not self.deterministic:
            return (
                "without deterministic=True bits depend on the batch, and a near tie between two "
                "tokens may fall the other way"
            )
        return (
            "weights, settings and kernels are the same: if its KV was computed again after an "
            "update (it was preempted, slept, or dropped its cache), what its tokens saw before is "
            "lost; else this should not be, please report it"
        )


def replay(
    journal: str | Path,
    request_id: str,
    *,
    checkpoint: str | Path | None = None,
    adapter: str | Path | None = None,
    **settings: Any,
) -> ReplayReport:
    """Start an engine as the journal's was, or on ``checkpoint``, and run the request again.

    ``settings``: of ``EngineConfig``, in place of the recorded ones. Each sample is drawn with the
    seed that it had, up to the first token of a version whose weights are not the checkpoint's.
    ``adapter``: the directory of the one that the request had, as PEFT writes it.
    Where tokens differ and no weight does, the layers of ``checkpoint`` are compared with
    transformers' (``layer_search.py``). ``ConfigError`` for an unknown request, or one that cannot
    be run again (images and videos).
    """
    found = find_request(Path(journal).expanduser(), request_id)
    _check_replayable(found, adapter)
    given = {k: v for k, v in found.facts["settings"].items() if k not in _LEFT_OUT}
    # As it was, whatever the files have: those of a later step may be in a trainer's own dtype.
    given |= {"dtype": found.facts["dtype"].removeprefix("torch."), "staging": "none", **settings}
    if checkpoint is not None:
        given |= {"model": str(checkpoint), "revision": None, "load_format": "auto"}
        if given.get("tokenizer") is None:
            given["tokenizer_revision"] = None
    if adapter is not None:
        had = {k: v for k, v in found.facts["settings"].items() if k in _OF_ADAPTERS}
        given |= {"max_adapters": 1, **had}
    backend = EmbeddedBackend(EngineConfig.from_dict(given))
    with Rollout.over(lambda: AsyncRollout.over(backend)) as engine:
        live = backend.digests(backend.config.start_timeout)
        facts = engine_facts(backend.config, 0, backend.core.rank_info)
        weights, differing, usable = _compared(found, live)
        if adapter is not None:
            differing += _adapted(engine, found, Path(adapter))
        samples = [_again(engine, found, index, usable) for index in range(len(found.samples))]
        info = engine.weight_info()
    layers: list[str] = []
    if checkpoint is not None and not differing and not found.adapter:
        layers = _layers(found, samples, Path(checkpoint), backend.config, info, facts)
    return ReplayReport(
        request_id=request_id,
        samples=tuple(samples),
        weights=weights,
        differing=differing,
        settings=tuple(differing_facts(found.facts, facts, without=_LEFT_OUT)),
        deterministic=bool(facts["deterministic"]),
        layers=tuple(layers),
    )


def _check_replayable(found: JournaledRequest, adapter: str | Path | None) -> None:
    """Raise ``ConfigError`` for a request that the journal, and ``adapter``, cannot make again."""
    name = f"request {found.request_id!r}"
    if found.images:
        raise ConfigError(f"{name} had images or videos, which the journal does not keep")
    if found.adapter and adapter is None:
        raise ConfigError(
            f"{name} had adapter {found.adapter}, whose factors the journal does not keep: give "
            "its directory, as PEFT's save_pretrained wrote it, with --adapter DIR"
        )
    if adapter is not None and not found.adapter:
        raise ConfigError(f"{name} had no adapter: leave out --adapter")
    if not any(sample.token_ids for sample in found.samples):
        raise ConfigError(
            f"{name} drew no token (it scored, classified or embedded), and a replay compares "
            "tokens: ask for it again, the prompt is in the journal"
        )


def _layers(
    found: JournaledRequest,
    samples: Sequence[SampleReplay],
    checkpoint: Path,
    config: EngineConfig,
    info: WeightInfo,
    facts: Mapping[str, Any],
) -> list[str]:
    """What a comparison of layers says up to the first token that differs; nothing where none."""
    wrong = next((sample for sample in samples if sample.first_difference is not None), None)
    if wrong is None or wrong.first_difference is None:
        return []
    if facts["device"] != "cpu":
        return ["layers: compared on a CPU alone"]
    tokens = found.samples[wrong.index].token_ids[: wrong.first_difference[0] + 1]
    ids = found.prompt_token_ids + tokens
    return find_layer(checkpoint, ids, info, layer_settings(config), config.timeout)


def _compared(
    found: JournaledRequest, live: Mapping[str, int]
) -> tuple[str, tuple[str, ...], set[int] | None]:
    """What the live weights are to the record's; the versions that they are, None: any."""
    if not found.digests:
        return "the journal has no digests of them, so nothing is known", (), None
    wrong = {
        version: [n for n in digests if digests[n] != live.get(n)]
        for version, digests in found.digests.items()
    }
    equal = {version for version, names in wrong.items() if not names}
    if equal:
        told = ", ".join(map(str, sorted(equal)))
        return f"those of version {told} ({len(live)} tensors, by digest)", (), equal
    version = min(wrong, key=lambda v: len(wrong[v]))
    count = f"{len(wrong[version])} of {len(found.digests[version])}"
    names = tuple(sorted(wrong[version], key=_depth))
    return f"{count} tensors differ from version {version}'s", names, None


def _adapted(engine: Rollout, found: JournaledRequest, directory: Path) -> tuple[str, ...]:
    """Serve the adapter under the name and version that it had; its name where it is another."""
    name, _, version = found.adapter.partition("@")
    engine.update_weights(adapters={name: directory}, version=int(version))
    digest = engine.weight_info().adapter_digests.get(name)
    same = found.adapter_digest is None or digest == found.adapter_digest
    return () if same else (f"{ADAPTER}{found.adapter}",)


def _depth(name: str) -> tuple[int, int]:
    """Where a tensor is in a forward pass: embeddings, layers, then the rest."""
    parts = name.split(".")
    number = next((int(part) for part in parts if part.isdigit()), None)
    if number is not None:
        return 1, number
    return (0 if any(part.startswith("embed") for part in parts) else 2), 0


def _layer_of(name: str) -> str:
    """The module that has a tensor."""
    return name.removesuffix(".weight").removesuffix(".bias").removeprefix("model.")


def _again(
    engine: Rollout, found: JournaledRequest, index: int, usable: set[int] | None
) -> SampleReplay:
    then, note = found.samples[index], ""
    count = _reach(then, len(found.prompt_token_ids), usable)
    if count < len(then.token_ids):
        note = f"what follows token {count} was computed by a version with other weights"
    if not count:
        return SampleReplay(
            index=index, recorded=len(then.token_ids), compared=0, first_difference=None,
            logprob_difference=0.0, note=note or "it has no token",
        )  # fmt: skip
    [output] = engine.generate(found.prompt_token_ids, _params(found, index, count))
    judged = _judged(index, then, output.outputs[0], count, note)
    if judged.first_difference is None or found.params.routed_experts is not None:
        return judged
    at, token, _ = judged.first_difference
    if token is None:
        return judged
    try:
        [scored] = engine.score([found.prompt_token_ids], [then.token_ids[: at + 1]], last_n=1)
    except EngineError:  # NaN here: that is the difference
        return judged
    logprobs = (then.logprobs[at], float(scored.logprobs[0]))
    return replace(judged, recorded_logprobs=logprobs)


def _judged(
    index: int, then: JournaledSample, now: Completion, count: int, note: str
) -> SampleReplay:
    old, new = then.token_ids[:count], now.token_ids[:count]
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    if same is None and len(old) != len(new):
        same = min(len(old), len(new))
    reach = count if same is None else same
    gaps = zip(then.logprobs[:reach], now.logprobs.raw[:reach], strict=True)
    difference = None
    if same is not None:
        difference = (same, _at(old, same), _at(new, same))
    return SampleReplay(
        index=index,
        recorded=len(then.token_ids),
        compared=count,
        first_difference=difference,
        logprob_difference=max((abs(a - b) for a, b in gaps), default=0.0),
        note=note,
    )


def _reach(sample: JournaledSample, prompt_len: int, usable: set[int] | None) -> int:
    """How many tokens the ``usable`` versions have given, with the KV of all that was before."""
    total = len(sample.token_ids)
    if usable is None:
        return total
    if any(s.version not in usable for s in sample.kv_spans if s.start < prompt_len):
        return 0
    return min((s.start for s in sample.weight_versions if s.version not in usable), default=total)


def _params(found: JournaledRequest, index: int, count: int) -> SamplingParams:
    """Of one sample alone, with its own seed."""
    params, seed = found.params, found.seeds[index]
    return replace(
        params,
        n=1,
        seed=seed - 2 * _SIGNED if seed >= _SIGNED else seed,
        max_tokens=count,
        min_tokens=min(params.min_tokens, count),
        min_version=None,
        min_version_epoch=None,
        max_staleness=None,
        pin=False,
        group_id=None,
        session_id=None,
        prompt_logprobs=None if params.routed_experts is None else 0,  # whose prompt is scored
        prompt_logprobs_start=0,
        prompt_temperature=1.0,
        hidden_state=False,
        pooling="last",
    )


def _at(tokens: list[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _token(token: int | None) -> str:
    return "none" if token is None else str(token)
