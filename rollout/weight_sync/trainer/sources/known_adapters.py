"""Plans of adapters that were sent before: one serves as long as nothing of its module changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from rollout.weight_sync.trainer.sources.adapters import start_of
from rollout.weight_sync.trainer.sources.lora import is_peft
from rollout.weight_sync.trainer.sources.names import submodules


@dataclass(slots=True)
class Known:
    """One adapter of a module of kind "plain": PEFT's name of it, and its plans."""

    adapter: str
    layers: list[ref[nn.Module]]
    facts: list[object]
    plans: list[Any] = field(default_factory=list)

    def fits(self, layers: list[nn.Module], facts: list[object]) -> bool:
        if len(self.layers) != len(layers) or self.facts != facts:
            return False
        return all(map(is_, (layer() for layer in self.layers), layers))


class KnownAdapters:
    """By module, which is not kept alive, and name."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[nn.Module, dict[str, Known]] = WeakKeyDictionary()

    def find(self, module: nn.Module, name: str) -> Known | None:
        """What was kept, if the module looks as it did; looks at its layers, at no values."""
        known = self._found.get(module, {}).get(name)
        return known if known is not None and known.fits(*_look(module)) else None

    def keep(self, module: nn.Module, name: str, adapter: str) -> list[Any]:
        """Where to put the plans of this adapter of a module of kind "plain"."""
        layers, facts = _look(module)
        known = Known(adapter, [ref(layer) for layer in layers], facts)
        self._found.setdefault(module, {})[name] = known
        return known.plans


def _look(module: nn.Module) -> tuple[list[nn.Module], list[object]]:
    """All layers, and what of them the kind of a source and an adapter's plan depend on."""
    layers, facts = submodules(module), list[object]()
    tuned: dict[type, bool] = {}
    for layer in layers:
        kind = type(layer)
        facts.append(kind)
        facts += layer._modules  # names, and below what they are of: a module may have several
        facts += map(id, layer._modules.values())
        for name, p in layer._parameters.items():
            if p is not None:
                facts += name, id(p), type(p), p.shape, p.requires_grad, hasattr(p, "ds_id")
        for name, buffer in layer._buffers.items():
            facts += name, type(buffer)
        if starts := start_of(layer):
            facts += starts.items()
        if kind not in tuned:
            tuned[kind] = is_peft(layer, "BaseTunerLayer")
        if tuned[kind]:
            facts.append(_settings(layer))
    return layers, facts


def _settings(layer: Any) -> list[object]:
    """How a layer of PEFT's is set: dicts are copied, as they change in place, and so do the
    tensors that ``prepare_model_for_compiled_hotswap`` makes of scalings.
    """
    found: list[object] = [*layer.active_adapters]
    held = layer.__dict__
    for name in _READ:
        each = held.get(name)
        if isinstance(each, dict):
            each = {k: v.item() if isinstance(v, Tensor) else v for k, v in each.items()}
        found.append(each)
    return found


# What ``AdapterPlan`` reads of a layer beside its modules and parameters.
_READ = ("r", "scaling", "lora_bias", "lora_variant", "fan_in_fan_out")
