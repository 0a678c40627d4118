"""Where adapters lie on a rank: slots beside the linears of a model, many at work in one step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from rollout.errors import ConfigError
from rollout.kernels.lora_linear import MOST_RANK
from rollout.models.adapters.away import AwayAdapters
from rollout.models.adapters.experts import (
    BesideExperts,
    ParameterAdapters,
    adaptable_experts,
    parts_of,
)
from rollout.models.adapters.instance import BesideLinear, InstanceAdapters
from rollout.models.adapters.linear import ActiveRows, EmbeddingAdapters, LinearAdapters
from rollout.models.adapters.model import Adapted, AdapterModel
from rollout.models.adapters.pages import AdapterPages
from rollout.models.layers.base import Layer, StandsFor
from rollout.models.layers.linear import MergedColumnLinear, ReplicatedLinear, RowLinear
from rollout.models.layers.router import Router
from rollout.models.model import Model
from rollout.weights import Box, Shape, WeightSlot
from rollout.weights.adapters import BIASED, NORMED, AdapterSpec
from rollout.weights.names import HEAD

_HEAD = HEAD.removesuffix(".weight")
_HOST = torch.device("cpu")
LINEARS = (MergedColumnLinear, RowLinear, ReplicatedLinear)


class AdapterSlots:
    """``count`` slots, each for one adapter of rank at most ``rank``; zeros where there is none.

    Cut over ranks as the linears are: of A what meets this rank's inputs, of B its outputs, so a
    row-parallel linear's part is summed with its own product. Outside of the model's instances,
    which share them; their addresses are fixed. A stage of a pipeline has those of its own modules;
    what adapters have beside the others' is known, and nothing of it is kept.
    """

    def __init__(
        self,
        model: Model,
        count: int,
        rank: int,
        vocabulary: bool = False,
        experts: bool = False,
        paged: bool = False,
    ) -> None:
        """``vocabulary``: of the embedding and the head, ``experts``: of routed experts, too.
        ``paged``: all adapters lie in host memory, and the slots here are places to copy them to.
        """
        self.pages = AdapterPages(self._place, self._counts) if paged else None
        self.count, self.rank = count, rank
        self.active = ActiveRows()
        self.dora: dict[int, tuple[int, AdapterSpec]] = {}  # slots with DoRA: which load, and its
        self.more = set[int]()  # slots with DoRA or biases
        self._loads = itertools.count()
        self._views: dict[int, AdapterModel] = {}  # the last of each slot
        self._build = model.build
        self._head = ActiveRows() if vocabulary else None
        self._is_plain = not (vocabulary or experts) and rank <= MOST_RANK
        self._away = {
            f"away.{kind.kinds[0]}": AwayAdapters(shapes, kind.kinds, count, model.build.device)
            for kind, shapes in _away_from(model, vocabulary, experts).items()
            if shapes
        }
        self.linears: dict[str, LinearAdapters] = {}
        for name, layer in _linears(model.policy.named_modules()):
            base = _base_of(name, layer)
            rows, columns = layer.specs["weight"].shape
            a, b = self._factors(len(base), rows, columns)
            is_cut = isinstance(layer, RowLinear) and model.build.tp.size > 1
            once = is_cut or getattr(layer, "of_parts", False)
            adds_bias = not once or model.build.tp.rank == 0
            self.linears[name] = LinearAdapters(base, a, b, self.active, is_cut, adds_bias)
        if self._head is not None and model.build.stage.is_first:
            self._add_vocabulary(model.policy, self._head)
        self.experts: dict[str, tuple[ParameterAdapters, ParameterAdapters]] = {}
        for name, layer in adaptable_experts(model.policy.named_modules()) if experts else ():
            made: dict[str, Any] = {"dtype": model.build.dtype, "device": model.build.device}
            w13, w2 = (ParameterAdapters(p, count, rank, **made) for p in parts_of(name, layer))
            self.experts[name] = w13, w2
        if experts and all(each.kinds != ParameterAdapters.kinds for each in self._all.values()):
            raise ConfigError(
                f"lora_experts=True: {model.config.architecture} has no routed experts that "
                "adapters could change; leave it out"
            )
        if not (self.linears or self._away):
            raise ConfigError(
                f"max_adapters: {model.config.architecture} has no linears of rollout's own, "
                "beside which adapters could lie; leave it out and load adapters merged"
            )

    def _factors(self, parts: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        made: dict[str, Any] = {"dtype": self._build.dtype, "device": self._build.device}
        a = torch.zeros(self.count, parts, self.rank, columns, **made)
        return a, torch.zeros(self.count, self.rank, rows, **made)

    def _add_vocabulary(self, model: Any, head: ActiveRows) -> None:
        """Of the embedding, as a linear of the vocabulary's part, and of the head, tied or not."""
        embedding, name = model.model.embedding, f"model.{model.config.arch.embedding}"
        [slot] = embedding.slots(name)
        size, (first, last) = slot.shape[1], (slot.take.starts[0], slot.take.stops[0])
        turned = WeightSlot(
            slot.source, slot.shape[::-1], Box((0, first), (size, last)),
            slot.param, Box((0, 0), (size, last - first)),
        )  # fmt: skip
        factors, is_cut = self._factors(1, size, last - first), model.build.tp.size > 1
        self.linears[name] = EmbeddingAdapters(slot, turned, *factors, self.active, is_cut)
        if model.score is None:
            if model.lm_head is not None:
                [slot] = [s for s in model.lm_head.slots(_HEAD) if s.param == HEAD]
            factors = self._factors(1, *model.head.specs["weight"].shape)
            base = [[replace(slot, source=HEAD)]]
            self.linears[_HEAD] = LinearAdapters(base, *factors, head, False)

    @property
    def nbytes(self) -> int:
        tensors = (tensor for each in self._all.values() for tensor in each.tensors)
        return sum(prod(t.shape) * t.element_size() for t in tensors)

    @property
    def _all(self) -> dict[str, LinearAdapters | ParameterAdapters | AwayAdapters]:
        experts = {
            f"{name}.{part}": each
            for name, both in self.experts.items()
            for part, each in zip(("w13", "w2"), both, strict=True)
        }
        return {**self.linears, **experts, **self._away}

    @property
    def modules(self) -> frozenset[str]:
        """What adapters may change, on any stage, by the names in files."""
        return frozenset(module for each in self._all.values() for module in each.modules)

    def attach(self, model: Model) -> None:
        """Have an instance's linears add what the slots hold, in steps that begin here."""
        policy: Any = model.policy
        own = InstanceAdapters(
            self.active,
            self._head,
            self.linears,
            self.dora,
            self.more,
            self.attach,
            captured=self.count if self._is_plain else 0,
        )
        policy.adapters = own
        for name, layer in _linears(policy.named_modules()):
            layer.adapters = BesideLinear(name, self.linears[name], own)
        for name, both in self.experts.items():
            policy.get_submodule(name).expert_adapters = BesideExperts(*both, self.active)
        name = f"model.{policy.config.arch.embedding}"
        if name in self.linears:
            policy.model.embedding.lookup_adapters = BesideLinear(name, self.linears[name], own)
        if _HEAD in self.linears:
            policy.head.adapters = BesideLinear(_HEAD, self.linears[_HEAD], own)

    def await_steps(self) -> None:
        """What is enqueued on the calling thread's stream of a GPU runs once steps that have been
        enqueued until now read no slot.
        """
        device, cuda = self._build.device, torch.cuda
        if device.type == "cuda":
            cuda.current_stream(device).wait_stream(cuda.default_stream(device))

    def view(self, slot: int, spec: AdapterSpec) -> AdapterModel:
        """One slot as a model of ``spec``, to be loaded, read and digested.

        ``ConfigError`` where it does not fit: too large a rank, or modules without slots.
        """
        if self.pages is not None:
            self._check(spec)
            parts = self.pages.of(slot, spec)
            return AdapterModel(replace(self._build, device=_HOST), spec, parts)
        seen = self._views.get(slot)
        if seen is not None and seen.spec == spec:
            return seen
        self._check(spec)
        found: dict[str, Adapted] = {
            name: each.of(slot)
            for name, each in self._all.items()
            if not spec.modules.keys().isdisjoint(each.modules)
        }
        unused = [each.of(slot) for name, each in self._all.items() if name not in found]

        def note(loaded: bool) -> None:
            self._counts(slot, spec if loaded else None)

        view = self._views[slot] = AdapterModel(self._build, spec, found, unused, note)
        return view

    def _place(self, slot: int) -> dict[str, Adapted]:
        return {name: each.of(slot) for name, each in self._all.items()}

    def _counts(self, slot: int, spec: AdapterSpec | None) -> None:
        """What a slot holds counts from now on; None: nothing does."""
        modules = {} if spec is None else spec.modules
        kinds = {module.kind for module in modules.values()}
        self.dora.pop(slot, None)
        if spec is not None and not kinds.isdisjoint(NORMED):
            self.dora[slot] = next(self._loads), spec
        (self.more.discard if kinds.isdisjoint((*NORMED, BIASED)) else self.more.add)(slot)
        for each in self.linears.values():
            of = {modules[m].kind for m in each.modules if m in modules}
            own = {slot} if BIASED in of else set[int]()
            each.biased = (each.biased - {slot}) | own  # a step may be reading the other one

    def _check(self, spec: AdapterSpec) -> None:
        if spec.rank > self.rank:
            raise ConfigError(
                f"the adapter has rank {spec.rank}, and slots are of rank {self.rank}: start the "
                f"engine with max_lora_rank={spec.rank}"
            )
        spec.check_modules(self.modules)
        self._check_kinds(spec)

    def _check_kinds(self, spec: AdapterSpec) -> None:
        for each in self._all.values():
            for module in each.modules:
                of = spec.modules.get(module)
                if of is not None and of.kind not in each.kinds:
                    raise ConfigError(
                        f"the adapter has {module} as {of.kind}, and here it is of kind "
                        f"{each.kinds[0]}: leave it out, or send the model merged"
                    )


def _away_from(
    model: Model, vocabulary: bool, experts: bool
) -> dict[type[LinearAdapters | ParameterAdapters], dict[str, Shape]]:
    """What other stages have, by what lies beside it there: by module the shape in files."""
    policy: Any = model.policy
    modules = [
        each
        for name, module in policy.named_modules()
        if isinstance(module, StandsFor)
        for each in module.away.named_modules(prefix=name)
    ]
    bases = (base for name, layer in _linears(modules) for base in _base_of(name, layer))
    linears = {_module(base[0]): base[0].shape for base in bases}
    found: dict[type[LinearAdapters | ParameterAdapters], dict[str, Shape]]
    found = {LinearAdapters: linears}
    if vocabulary and not model.build.stage.is_first:
        [slot] = policy.model.embedding.slots(f"model.{policy.config.arch.embedding}")
        found[EmbeddingAdapters] = {_module(slot): slot.shape}
        if policy.score is None:
            linears[_HEAD] = slot.shape
    if experts:
        parts = (part for each in adaptable_experts(modules) for part in parts_of(*each))
        found[ParameterAdapters] = {part.module: part.shape for part in parts}
    return found


def _base_of(name: str, layer: Layer) -> list[list[WeightSlot]]:
    """By part of a linear, the slots of its weight that one source fills."""
    slots = [slot for slot in layer.slots(name) if slot.param == f"{name}.weight"]
    slots.sort(key=lambda slot: slot.put.starts)
    return [list(part) for _, part in groupby(slots, key=lambda slot: slot.source)]


def _module(slot: WeightSlot) -> str:
    return slot.source.removesuffix(".weight")


def _linears(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Layer]]:
    """The linears of the policy's blocks that adapters may be served beside, by name."""
    for name, module in modules:
        if not name.startswith("model.layers."):
            continue  # a tower's run before the step that begins here
        if isinstance(module, LINEARS) and not isinstance(module, Router):
            yield name, module
