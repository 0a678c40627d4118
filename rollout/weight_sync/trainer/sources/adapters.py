"""Adapters as sources of their own: the factors of a PEFT model, or of a PEFT directory, alone.

base_model.model.model.layers.0.q_proj.lora_A.NAME.weight    in the trainer
model.layers.0.q_proj.lora_A.weight                          in a file, and as it is sent
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollout.errors import ConfigError
from rollout.loader.peft_adapter import STARTS_BESIDE
from rollout.weight_sync.trainer.sources.lora import DORA as DORA_VARIANT
from rollout.weight_sync.trainer.sources.lora import MAGNITUDE as MAGNITUDES
from rollout.weight_sync.trainer.sources.lora import (
    QUANTIZED,
    REMEDY,
    MergePlan,
    is_peft,
    join,
    type_name,
)
from rollout.weight_sync.trainer.sources.names import submodules
from rollout.weights.adapters import (
    BIAS,
    BIASED,
    DORA,
    DORA_EMBEDDING,
    EMBEDDING,
    EMBEDDING_A,
    EMBEDDING_B,
    EXPERTS,
    LINEAR,
    MAGNITUDE,
    A,
    AdapterSpec,
    B,
    ModuleSpec,
)
from rollout.weights.components import adapter_component
from rollout.weights.names import placed, unwrapped

# By kind, where PEFT's layer has what is sent as what.
_PARTS = {
    LINEAR: (("lora_A", A), ("lora_B", B)),
    DORA: (("lora_A", A), ("lora_B", B), (MAGNITUDES, MAGNITUDE)),
    EXPERTS: (("lora_A", A), ("lora_B", B)),
    BIASED: (("lora_A", A), ("lora_B", B), ("lora_B", BIAS)),
    DORA_EMBEDDING: (
        ("lora_embedding_A", EMBEDDING_A),
        ("lora_embedding_B", EMBEDDING_B),
        (MAGNITUDES, MAGNITUDE),
    ),
    EMBEDDING: (("lora_embedding_A", EMBEDDING_A), ("lora_embedding_B", EMBEDDING_B)),
}
_NORMED_WORDS = "DoraEmbeddingVariant"
_MERGE = "send it merged into the model: update_weights(model) without adapters"


def is_adapted(obj: Any) -> bool:
    """Whether a module has layers of PEFT's; imports nothing."""
    return any(True for _ in tuner_layers(obj))


def adapter_names(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """PEFT's names of the adapters that ``module`` has, and of those that are active."""
    known: dict[str, None] = {}
    active: dict[str, None] = {}
    for layer in tuner_layers(module):
        own = [
            name for role in layer.adapter_layer_names for name in getattr(layer, role, None) or ()
        ]
        known.update(dict.fromkeys(own))
        active.update(dict.fromkeys(name for name in layer.active_adapters if name in own))
    return tuple(known), tuple(active)


def merged_names(obj: Any) -> tuple[str, ...]:
    """PEFT's names of the adapters that the weights of ``obj`` are sent merged with."""
    found: dict[str, None] = {}
    for layer in tuner_layers(obj):
        if layer.merged:
            found.update(dict.fromkeys(layer.merged_adapters))
        elif not layer.disable_adapters:
            held = (getattr(layer, role, None) or () for role in layer.adapter_layer_names)
            own = {name for each in held for name in each}
            found.update(dict.fromkeys(name for name in layer.active_adapters if name in own))
    return tuple(found)


def chosen_adapter(module: nn.Module, name: str) -> str:
    """Which of PEFT's adapters is sent as ``name``: the one called so, else the only active one."""
    known, active = adapter_names(module)
    if name in known:
        return name
    if len(active) != 1:
        raise ConfigError(
            f"adapter {name!r}: the PEFT model has {', '.join(known) or 'none'}, of which "
            f"{len(active)} are active; activate one (set_adapter), or name one of them"
        )
    return active[0]


class AdapterPlan(MergePlan):
    """Names and scalings of one adapter of a PEFT model; local, the same on every rank.

    ``spec``: as the engine is told; ``factors``: by their names in the module. ``trained_beside``:
    what the model trains that is no factor. ``start``: its ``init_lora_weights``, where that has
    changed the base. ``prefixes``: of ``weights.names.placed``.
    ``ConfigError`` names the layer whose adapter is served merged alone.
    """

    def __init__(self, module: nn.Module, adapter: str, prefixes: Mapping[str, str]) -> None:
        self._adapter, self._prefixes = adapter, prefixes
        self._modules: dict[str, ModuleSpec] = {}
        self.factors: dict[str, torch.Tensor] = {}
        self.start: str | None = None
        super().__init__(module)
        if not self._modules:
            raise ConfigError(f"adapter {adapter!r} changes no linear layer; {_MERGE}")
        self.spec = AdapterSpec(modules=self._modules)
        self.trained_beside = tuple(sorted(self._trained))

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """``factors`` by the names that they are sent under."""
        return {self.owners[raw]: factor for raw, factor in self.factors.items()}

    def name_of(self, raw: str) -> str | None:
        return self.owners.get(unwrapped(raw))

    def _visit(self, module: Any, path: str, to: str, changed: bool) -> None:
        start = start_of(module).get(self._adapter)
        if start not in STARTS_BESIDE:
            self.start = start
        super()._visit(module, path, to, changed)

    def _plan_layer(self, layer: Any, path: str, to: str) -> None:
        adapter = self._adapter
        roles = [r for r in layer.adapter_layer_names if adapter in (getattr(layer, r, None) or ())]
        if not roles:
            return
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        kinds = {("Linear", None): LINEAR, ("Linear", DORA_VARIANT): DORA}
        kinds |= {("Embedding", None): EMBEDDING, ("Embedding", _NORMED_WORDS): DORA_EMBEDDING}
        leaf = getattr(layer, "parameter_name", "weight")
        if leaf != "weight" and layer._did_swap_in_out_features:  # [experts, outputs, inputs]
            kinds["ParamWrapper", None] = EXPERTS
        of = "Linear" if type_name(layer) in QUANTIZED else type_name(layer)
        key = of, None if variant is None else type(variant).__name__
        found = kinds.get(key) if is_peft(layer, "LoraLayer") else None
        if found is None or (of != "Embedding" and getattr(layer, "fan_in_fan_out", False)):
            kind = type(layer if variant is None else variant).__name__
            raise ConfigError(f"{to}: {kind} is not served as an adapter; {_MERGE}")
        if layer.lora_bias.get(adapter):
            found = BIASED  # PEFT has it of plain linears alone
        weight = placed(f"{to}.{leaf}", self._prefixes)
        if weight is None:
            raise ConfigError(f"{to}: the engine has no such module; leave it out of the adapter")
        stem = weight.removesuffix(".weight")
        self._modules[stem] = ModuleSpec(
            rank=_rank(layer, adapter, found),
            scaling=float(layer.scaling[adapter]),
            kind=found,
        )
        for role, end in _PARTS[found]:
            held = getattr(layer, role)[adapter]
            bare, leaf = isinstance(held, nn.Parameter), "bias" if end == BIAS else "weight"
            raw = f"{join(path, role)}.{adapter}{'' if bare else f'.{leaf}'}"
            self.owners[raw] = stem + end
            self.factors[raw] = held if bare else getattr(held, leaf)

    def _visit_saved(self, module: Any, path: str, to: str) -> None:
        if self._adapter in (getattr(module, "modules_to_save", None) or ()):
            raise ConfigError(
                f"{to}: a module that is trained as a whole (modules_to_save) is no adapter's; "
                f"{_MERGE}"
            )
        if self._adapter in getattr(module, "_adapters", ()):
            raise ConfigError(
                f"{to}: what {type(module).__name__} trains there is no adapter's; {REMEDY}"
            )
        self._visit(module.original_module, join(path, "original_module"), to, False)

    def _leave_out(self, module: nn.Module, to: str, but: str) -> None:
        """For ``_refuse_ties`` alone."""

    def _refuse_ties(self) -> None:
        """A tie of the weights beneath stays: factors are applied beside them."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as it was passed: ``obj`` is a module with adapters, or a directory of PEFT's.

    ``peft_name``: of the adapter within the module.
    """

    name: str
    obj: Any
    peft_name: str = ""

    @classmethod
    def of(cls, name: Any, obj: Any, module: nn.Module | None) -> Adapter:
        """``module``: what ``obj`` is without its wrappers, where it is a module."""
        if not isinstance(name, str):
            raise ConfigError(f"an adapter's name is text, got {name!r:.80}")
        adapter_component(name)
        if module is not None and is_adapted(module):
            return cls(name, obj, chosen_adapter(module, name))
        if isinstance(obj, str | Path) and obj != "" and Path(obj).is_dir():
            return cls(name, Path(obj))
        what = repr(str(obj)) if isinstance(obj, str | Path) else f"a {type(obj).__name__}"
        raise ConfigError(
            f"adapter {name!r} is {what:.300}; pass a PEFT model (in DDP, FSDP or DeepSpeed as it "
            "is trained), or a directory that its save_pretrained wrote"
        )

    @property
    def component(self) -> str:
        return adapter_component(self.name)


def _rank(layer: Any, adapter: str, kind: str) -> int:
    """A hot swap of PEFT's may pad a linear's factors, or put larger ones there; ``r`` stays."""
    if kind in (LINEAR, DORA, BIASED):
        down = layer.lora_A[adapter].weight
        shape = getattr(down, "ds_shape", down.shape)
        if len(shape) == 2:  # it is not flattened, as by FSDP1
            return int(shape[0])
    return int(layer.r[adapter])


def start_of(module: nn.Module) -> dict[str, Any]:
    """Where ``module`` holds PEFT's settings: the ``init_lora_weights`` of each adapter."""
    held = module.__dict__.get("peft_config")
    if not isinstance(held, dict):
        return {}
    return {name: getattr(one, "init_lora_weights", None) for name, one in held.items()}


def tuner_layers(obj: Any) -> Iterator[Any]:
    """PEFT's layers in a module, whatever it is wrapped in; none in anything else."""
    if "peft" not in sys.modules or not isinstance(obj, nn.Module):
        return iter(())
    return (layer for layer in submodules(obj) if is_peft(layer, "BaseTunerLayer"))
