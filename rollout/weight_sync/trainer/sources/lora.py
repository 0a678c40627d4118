"""What of a PEFT model is merged into which weight, read off its modules; imports no PEFT.

PeftModel            base_model.model....      the name in a file has neither component
  LoRA layer         q_proj.base_layer.weight  sent as q_proj.weight, with what its adapters add
                     q_proj.lora_A.default...  gathered with it, never sent
  modules_to_save    lm_head.modules_to_save.default.weight     sent as lm_head.weight
                     lm_head.original_module.weight             not sent
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rollout.errors import ConfigError, SourceFailed, some
from rollout.weight_sync.trainer.sources.names import NameOf, submodules, wire_dtype
from rollout.weights import Box, TensorMeta
from rollout.weights.names import WRAPPERS, unwrapped

# The layers whose merge is an addition, with what holds their factors.
MERGED = {
    "Linear": ("lora_A", "lora_B"),
    "Embedding": ("lora_embedding_A", "lora_embedding_B"),
    "ParamWrapper": ("lora_A", "lora_B"),
}
# Whose base holds codes: what they add is what ``Linear`` adds, but to no plain weight.
QUANTIZED = frozenset(
    {
        *("Linear4bit", "Linear8bitLt", "GPTQLoraLinear", "AwqLoraLinear", "AqlmLoraLinear"),
        *("EetqLoraLinear", "HqqLoraLinear", "IncLoraLinear", "TorchaoLoraLinear"),
    }
)
DORA, MAGNITUDE = "DoraLinearVariant", "lora_magnitude_vector"
REMEDY = (
    "use plain LoRA there; or, where every rank has whole weights, call merge_adapter() before "
    "the update and unmerge_adapter() after it"
)


@dataclass(frozen=True, slots=True)
class Addition:
    """What one adapter adds to one weight; ``factors`` maps a role to a gathered tensor's name."""

    layer: Any
    adapter: str
    factors: Mapping[str, str]

    @torch.no_grad()
    def add_to(self, weight: Tensor, found: Mapping[str, Tensor]) -> None:
        """Merge in place, by PEFT's own arithmetic: the same bits as its ``merge()``."""
        factors = {role: found[name] for role, name in self.factors.items()}
        if "bias" in factors:
            weight += factors["bias"] * self.layer.scaling[self.adapter]
            return
        whole = _Whole(self.layer, self.adapter, weight, factors)
        delta = type(self.layer).get_delta_weight(whole, self.adapter)
        if MAGNITUDE in factors:
            self._scale(weight, weight + delta, factors[MAGNITUDE])
            return
        weight += delta.to(weight.dtype) if "lora_embedding_A" in factors else delta

    def _scale(self, weight: Tensor, adapted: Tensor, magnitude: Tensor) -> None:
        """DoRA (arXiv:2402.09353, eq. 5): each output's row of ``adapted`` gets its own norm."""
        rows = adapted.T if self.layer.fan_in_fan_out else adapted
        factor = magnitude / torch.linalg.norm(rows, dim=1)
        weight.copy_(adapted * (factor if self.layer.fan_in_fan_out else factor[:, None]))


class _Whole:
    """A LoRA layer with whole tensors in place of what may be shards; else the layer itself."""

    def __init__(
        self, layer: Any, adapter: str, weight: Tensor, factors: Mapping[str, Tensor]
    ) -> None:
        self._layer, self._weight = layer, weight
        for role, tensor in factors.items():
            bare = role.startswith("lora_embedding")
            setattr(self, role, {adapter: tensor if bare else SimpleNamespace(weight=tensor)})

    def get_param(self) -> Tensor:
        return self._weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class MergePlan:
    """Names and additions of one PEFT model; local, the same on every rank.

    ``additions``: by file name, what is added to a weight, in order. ``owners``: by name of a
    factor, the weight it is for. ``partial``: leave out what the adapters do not change, which is
    what they neither adapt, nor save, nor train. ``merge`` False: the base alone, whose adapters
    go beside it. ``place``: from a file name to the engine's, None of what it does not take.
    Raises ``ConfigError`` naming the layer for what cannot be merged tensor by tensor: DoRA of
    embeddings or beside other active adapters, other variants, quantised bases, other tuners, and
    weights that are adapted here and tied to others there.
    """

    def __init__(
        self,
        module: nn.Module,
        partial: bool = False,
        merge: bool = True,
        place: NameOf = lambda name: name,
    ) -> None:
        self.additions: dict[str, list[Addition]] = defaultdict(list)
        self.owners: dict[str, str] = {}
        self._partial, self._merge, self._place = partial, merge, place
        self._paths: dict[str, tuple[str, bool]] = {}  # by a module's path: in a file, and changed
        self._trained: set[str] = set()
        self._holders: dict[int, list[str]] = defaultdict(list)
        self._left_out: dict[int, str] = {}
        self._visit(module, "", "", False)
        self._refuse_ties()

    @classmethod
    def of(
        cls,
        module: nn.Module,
        partial: bool = False,
        merge: bool = True,
        place: NameOf = lambda name: name,
    ) -> MergePlan | None:
        """The plan of ``module``, None where no part of it is PEFT's."""
        if "peft" not in sys.modules or not any(map(is_peft, submodules(module))):
            return None
        return cls(module, partial, merge, place)

    def name_of(self, raw: str) -> str | None:
        """What a tensor of the module is gathered as: its file name, a factor's own, or None."""
        name = unwrapped(raw)
        if name in self.owners:
            return name
        path, _, leaf = name.rpartition(".")
        if path not in self._paths:
            return None
        to, changed = self._paths[path]
        found = join(to, leaf)
        if self._partial and not changed and found not in self._trained:
            return None
        return self._place(found)

    def factors_of(self, target: str) -> list[str]:
        return [name for one in self.additions[target] for name in one.factors.values()]

    def _visit(self, module: Any, path: str, to: str, changed: bool) -> None:
        """``path``: the module's own, without wrappers; ``to``: its path in a checkpoint file."""
        flat = module._parameters.get("_flat_param")  # FSDP1 hides what it flattens
        changed = changed or (flat is not None and flat.requires_grad)
        self._paths[path] = (to, changed)
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                name = join(to, leaf)
                self._holders[id(parameter)].append(self._place(name) or name)
                if parameter.requires_grad:
                    self._trained.add(join(to, leaf))
        if is_peft(module, "BaseTunerLayer"):
            self._plan_layer(module, path, to)
            self._leave_out(module, to, but="base_layer")
            self._visit(module.base_layer, join(path, "base_layer"), to, True)
        elif is_peft(module, "AuxiliaryTrainingWrapper"):
            self._visit_saved(module, path, to)
        elif is_peft(module, "PeftModel", "PeftMixedModel"):
            if not is_peft(module.base_model, "BaseTuner"):
                raise ConfigError(
                    f"{to or 'the model'}: {type(module).__name__} without adapted layers: prompts "
                    "that are learnt change no weight, and are not sent; use LoRA"
                )
            self._visit(module.base_model, join(path, "base_model"), to, changed)
        elif is_peft(module, "BaseTuner"):
            self._visit(module.model, join(path, "model"), to, changed)
        else:
            for name, child in module._modules.items():
                if child is None:
                    continue
                if name in WRAPPERS or (not path and name == "module"):
                    self._visit(child, path, to, changed)
                else:
                    self._visit(child, join(path, name), join(to, name), changed)

    def _plan_layer(self, layer: Any, path: str, to: str) -> None:
        """What the forward of ``layer`` would add to its base, if anything."""
        if not self._merge:
            if layer.merged:
                raise ConfigError(f"{to}: its adapter is merged into it; unmerge_adapter() first")
            return
        if layer.merged and layer.disable_adapters:
            raise ConfigError(f"{to}: merged and disabled; call unmerge_adapter() first")
        if layer.merged or layer.disable_adapters:
            return  # the base is what is computed with
        active = [
            adapter
            for adapter in layer.active_adapters
            if any(
                adapter in (getattr(layer, name, None) or ()) for name in layer.adapter_layer_names
            )
        ]
        for adapter in active:
            roles = _roles_of(layer, adapter, to)
            if MAGNITUDE in roles and len(active) > 1:
                raise _refusal(to, "DoRA beside another active adapter")
            target = join(to, getattr(layer, "parameter_name", "weight"))
            leaf = "" if roles[0].startswith("lora_embedding") else ".weight"
            names = {role: f"{join(path, role)}.{adapter}{leaf}" for role in roles}
            self._add(target, Addition(layer, adapter, names))
            if layer.lora_bias.get(adapter):
                if layer.base_layer.bias is None:
                    raise ConfigError(
                        f"{to}: lora_bias has no bias to be merged into, nor could PEFT merge it; "
                        "leave it out of the adapter"
                    )
                name = f"{join(path, 'lora_B')}.{adapter}.bias"
                self._add(join(to, "bias"), Addition(layer, adapter, {"bias": name}))

    def _add(self, target: str, addition: Addition) -> None:
        if (placed := self._place(target)) is not None:
            self.additions[placed].append(addition)
            self.owners.update(dict.fromkeys(addition.factors.values(), placed))

    def _visit_saved(self, module: Any, path: str, to: str) -> None:
        """A module that is trained as a whole, or some rows of it, beside the original one."""
        if is_peft(module, "TrainableTokensWrapper"):
            self._visit(module.token_adapter, join(path, "token_adapter"), to, True)
            return
        used = [] if module.disable_adapters else list(module.active_adapters)
        if not used:
            # The engine may have what was trained beside it from an update before.
            self._visit(module.original_module, join(path, "original_module"), to, True)
            return
        self._leave_out(module, to, but="modules_to_save")
        chosen = module.modules_to_save[used[0]]
        self._visit(chosen, f"{join(path, 'modules_to_save')}.{used[0]}", to, True)

    def _leave_out(self, module: nn.Module, to: str, but: str) -> None:
        for name, child in module.named_children():
            if name != but:
                self._left_out.update({id(p): to for p in child.parameters()})

    def _refuse_ties(self) -> None:
        """A weight that is adapted, or replaced, in one place only is not tied any more."""
        for key, names in self._holders.items():
            adapted = [name for name in names if name in self.additions]
            replaced = self._left_out.get(key)
            if replaced is not None or (adapted and len(set(names)) > 1):
                where = replaced or adapted[0]
                others = some([name for name in dict.fromkeys(names) if name != where])
                raise ConfigError(
                    f"{where} is trained by an adapter, but its weight is tied to {others}: one "
                    "tensor cannot hold both; load the model with tie_word_embeddings=False, or "
                    "leave it out of the adapter"
                )


def _roles_of(layer: Any, adapter: str, to: str) -> tuple[str, ...]:
    """The attributes of ``layer`` that hold what is merged of ``adapter``."""
    roles = MERGED.get(type_name(layer)) if is_peft(layer, "LoraLayer") else None
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if roles is not None and variant is None:
        return roles
    if roles is not None and type(variant).__name__ == DORA:
        return (*roles, MAGNITUDE)
    if type_name(layer) in QUANTIZED:
        raise ConfigError(
            f"{to or 'the model'}: {type_name(layer)} cannot be merged, its base is quantised; "
            "send its adapter alone, update_weights(model, adapters_only=True), to an engine that "
            "was started with max_adapters=, or merge it into a base that is not quantised"
        )
    raise _refusal(to, type(layer if variant is None else variant).__name__)


def type_name(layer: object) -> str:
    """The name of PEFT's own class of ``layer`` (``fully_shard`` derives another from it)."""
    return next(c.__name__ for c in type(layer).__mro__ if c.__module__.startswith("peft."))


def is_peft(module: object, *names: str) -> bool:
    """Whether ``module`` is of one of PEFT's classes of these names (of any, without names)."""
    kind: Any = type(module)
    return _is_peft(kind, names)


@cache
def _is_peft(kind: type, names: tuple[str, ...]) -> bool:
    return any(
        cls.__module__.startswith("peft.") and (not names or cls.__name__ in names)
        for cls in kind.__mro__
    )


def _refusal(to: str, what: str) -> ConfigError:
    return ConfigError(f"{to or 'the model'}: {what} cannot be merged tensor by tensor; {REMEDY}")


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


T = TypeVar("T")


class MergedSource:
    """Adds to each weight that ``inner`` yields what its adapters add; on the sender alone.

    ``inner`` gathers in the tensors' own dtypes, so that a merge has the bits of PEFT's own; the
    cast to the wire's follows it. The trainer's tensors are never written to. Peak extra memory
    beside ``inner``'s: on the sender, the weights whose factors have not come yet (one; FSDP1:
    those of a unit) and one product of factors, in their own dtype. Raises ``SourceFailed`` where
    a weight or a factor does not come.
    """

    def __init__(self, inner: Any, plan: MergePlan, dtype: torch.dtype) -> None:
        self.inner, self.agreement = inner, inner.agreement
        self._plan, self._dtype = plan, dtype

    def metadata(self) -> tuple[TensorMeta, ...] | None:
        metadata: tuple[TensorMeta, ...] | None = self.inner.metadata()
        if metadata is None:
            return None
        items = ((meta.name, meta) for meta in metadata)
        return tuple(
            TensorMeta(name, wire_dtype(name, meta.dtype, self._dtype), meta.shape)
            for name, meta, _ in self._complete(items, lambda meta: meta)
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        sending = self.agreement.is_sender
        items = iter(self.inner)
        # An iterator that ends early must close the inner one: it may hold gathered parameters.
        with closing(items) if hasattr(items, "close") else nullcontext():
            # What is held outlives the next item, and is added to: a copy of the trainer's.
            keep = Tensor.clone if sending else lambda tensor: tensor
            for name, tensor, factors in self._complete(items, keep):
                if factors and sending:
                    # In an autocast of the caller's the products would be rounded.
                    with torch.autocast(tensor.device.type, enabled=False):
                        for addition in self._plan.additions[name]:
                            addition.add_to(tensor, factors)
                yield name, tensor.to(wire_dtype(name, tensor.dtype, self._dtype))

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        """No box of a merged weight is held by any rank before it is merged."""
        return [
            (name, [] if name in self._plan.additions else boxes)
            for name, boxes in self.inner.local_boxes()
            if name not in self._plan.owners
        ]

    def _complete(
        self, items: Iterable[tuple[str, T]], keep: Callable[[T], T]
    ) -> Iterator[tuple[str, T, dict[str, T]]]:
        """Each weight with the factors of what is added to it, as soon as all of them have come."""
        held: dict[str, T] = {}
        found: dict[str, T] = {}
        for name, value in items:
            target = self._plan.owners.get(name, name)
            if target not in self._plan.additions:
                yield name, value, {}
                continue
            (held if name == target else found)[name] = keep(value)
            names = self._plan.factors_of(target)
            if target in held and all(factor in found for factor in names):
                yield target, held.pop(target), {factor: found.pop(factor) for factor in names}
        if held or found:
            raise SourceFailed(
                f"{some([*held, *found], 4)} came without the tensors to merge with; is a "
                "weight that an adapter changes shared with another module?"
            )
