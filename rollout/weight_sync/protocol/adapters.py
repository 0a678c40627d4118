"""Adapters of an update: what an engine must have for them, and what must be sent of each."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from rollout.errors import ConfigError, VersionConflict, WeightMismatch, some
from rollout.weight_sync.protocol.digests import total
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weights import TensorMeta
from rollout.weights.adapters import EXPERTS, LINEAR, AdapterSpec
from rollout.weights.components import adapter_component, qualified
from rollout.weights.fused_experts import FusedExperts
from rollout.weights.names import weight_dtype
from rollout.weights.spellings import Spellings
from rollout.weights.wanted import WantedWeights


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """The newest version of an adapter; ``digest`` is ``adapter_digest``."""

    name: str
    version: int
    digest: int


def held_adapters(info: WeightInfo) -> tuple[HeldAdapter, ...]:
    """What an engine announces of its adapters, by name; ``VersionConflict`` where it does not
    prove what they are: it commits, or is of a version that does not.
    """
    digests = info.adapter_digests
    if unproven := info.adapters.keys() - digests.keys():
        raise VersionConflict(f"no digest is told of the adapters {some(sorted(unproven))}")
    found = sorted(info.adapters.items())
    return tuple(HeldAdapter(name, version, digests[name]) for name, version in found)


def adapter_digest(name: str, version: int, spec: AdapterSpec, tensors: int) -> int:
    """64 bits over all that ``name@version`` is; ``tensors``: the digest of its factors."""
    modules: list[tuple[Any, ...]] = sorted(
        (module, of.rank, of.scaling, *([] if of.kind == LINEAR else [of.kind]))
        for module, of in spec.modules.items()
    )
    text = json.dumps([name, version, tensors, modules])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def digest_of_all(models: int, adapters: Iterable[int]) -> int:
    """Of all that an engine holds live: the models' digest, and each adapter's."""
    return total([models, *adapters])


def check_adapters(
    adapters: Mapping[str, AdapterSpec], info: WeightInfo, wanted: WantedWeights
) -> None:
    """Before anything is gathered: ``ConfigError`` where the engine holds no such adapters."""
    check_room(adapters, info.max_adapters, info.max_lora_rank)
    for name, spec in adapters.items():
        adapter_tensors(name, spec, wanted)


def check_merged(merged: Collection[str], served: Collection[str], *, sent: bool) -> None:
    """``ConfigError`` where adapters would be ``served`` on top of a policy that adapters were
    ``merged`` into, and so count twice. ``sent``: it is sent so; else it is what is live.
    """
    if not merged or not served:
        return
    names = some(sorted(served))
    if sent:
        raise ConfigError(
            f"this PEFT model would be merged into the base, and {names} served on top of it: pass "
            "adapters_only=True, or adapters={name: model} beside the model; or unload those; or "
            "send what merge_and_unload() leaves, if that is what you want"
        )
    raise ConfigError(
        f"the live base was sent merged with {some(list(merged))}: {names} on top of it would "
        "count twice. Send the base with it, unmerged, by update_weights(model, "
        "adapters={name: model}); or first by itself, under model.disable_adapter(). A base that "
        "an adapter was trained on top of is sent as merge_and_unload() leaves it"
    )


def check_room(adapters: Mapping[str, AdapterSpec], slots: int, max_rank: int) -> None:
    """``ConfigError`` where an engine of ``slots`` slots of rank ``max_rank`` cannot hold them."""
    if not adapters:
        return
    if not slots:
        raise ConfigError(
            f"adapter {next(iter(adapters))!r}: the engine holds no adapters: start it with "
            "max_adapters=, or send the PEFT model merged: update_weights(model)"
        )
    if len(adapters) > slots:
        raise ConfigError(
            f"{len(adapters)} adapters come at once, and max_adapters is {slots}: send fewer, or "
            "start the engine with more"
        )
    for name, spec in adapters.items():
        if not spec.rank:
            raise ConfigError(f"adapter {name!r} changes no module")
        if spec.rank > max_rank:
            raise ConfigError(
                f"adapter {name!r} has rank {spec.rank}, and the engine takes up to {max_rank}: "
                f"start it with max_lora_rank={spec.rank}"
            )


def adapter_tensors(name: str, spec: AdapterSpec, base: WantedWeights) -> tuple[TensorMeta, ...]:
    """All that has to come of adapter ``name``, as an update calls it, in the base's dtypes.

    ``WeightMismatch`` names the modules that the ``base`` has not.
    """
    found, problems = [], []
    component = adapter_component(name)
    is_stacked = any(of.kind == EXPERTS for of in spec.modules.values())
    stacked = _stacked(base.tensors) if is_stacked else {}
    for module, of in spec.modules.items():
        if of.kind == EXPERTS:
            beside, what = stacked.get(module), "stack of experts"
        else:
            beside, what = base.get(f"{module}.weight"), "linear layer"
        if beside is None or len(beside.shape) != (3 if of.kind == EXPERTS else 2):
            problems.append(f"adapter {name!r} changes {module}, which is no {what} here")
            continue
        found += [
            TensorMeta(qualified(component, each), weight_dtype(each, beside.dtype), shape)
            for each, shape in of.tensors(module, beside.shape).items()
        ]
    if problems:
        raise WeightMismatch(
            f"{some(problems, between='; ')}: adapt modules that the engine's model has",
            problems=problems,
        )
    return tuple(found)


def _stacked(base: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    """The parameters [experts, rows, columns] that transformers 5 has in memory, by name there."""
    spelt = Spellings.of({meta.name: meta.shape for meta in base.values()})
    found = {new: base[old] for new, old in spelt.renames.items()}
    for name, one in spelt.fused.items():
        if isinstance(one, FusedExperts):
            first, _ = next(one.boxes())
            found[name] = TensorMeta(name, base[first].dtype, one.shape)
    return found
