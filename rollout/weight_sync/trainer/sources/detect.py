"""Where an update's tensors come from: anything a trainer holds, seen as one lockstep stream."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollout.config import DEFAULT_TIMEOUT
from rollout.errors import ConfigError, SourceFailed
from rollout.weight_sync.protocol.adapters import check_adapters
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.adapters import merged_names
from rollout.weight_sync.trainer.sources.base import LocalSource, WeightSource
from rollout.weight_sync.trainer.sources.components import together
from rollout.weight_sync.trainer.sources.kinds import (
    READ_TWICE,
    bare_module,
    is_dtensor_pair,
    kind_of,
    ranks_of,
    several_ranks,
)
from rollout.weight_sync.trainer.sources.names import Naming, held_by
from rollout.weight_sync.trainer.sources.placed import placed_source
from rollout.weight_sync.trainer.sources.values import Incoming
from rollout.weights.adapters import AdapterSpec
from rollout.weights.components import POLICY, adapter_of, check_components, component_of
from rollout.weights.names import file_form, placed
from rollout.weights.wanted import WantedWeights

_SOURCES = (nn.Module, WeightSource, Mapping, str, Path, Iterator, *READ_TWICE)  # no tensor is one


@dataclass(frozen=True, slots=True)
class Detected:
    """What a trainer has passed: which kind of source it is, and which ranks hold it together.

    ``ranks``: of the trainer's job, the sender first; None where ``obj`` is this rank's alone.
    ``parts``: of ``{"policy": source, ...}``, whose kind is "components": what each of them is.
    ``unmerged``: a PEFT model's adapters go beside it.
    """

    obj: Any
    kind: str
    ranks: tuple[int, ...] | None
    parts: tuple[tuple[str, Detected], ...] = ()
    unmerged: bool = False

    @property
    def components(self) -> tuple[str, ...]:
        """What is updated; a source by itself is the policy's."""
        if self.kind == "source":  # whose names may say more than one
            return tuple(getattr(self.obj, "components", (POLICY,)))
        return tuple(chain.from_iterable(_told(*part) for part in self.parts)) or (POLICY,)

    def rank_group(self, timeout: float = DEFAULT_TIMEOUT) -> RankGroup:
        """The group of the ranks that hold it; of this rank alone where it is not shared.

        Collective over those ranks, which must all come within ``timeout`` seconds.
        """
        if self.kind == "components" and (group := self._agreement()) is not None:
            return group
        if self.kind != "source":
            return RankGroup() if self.ranks is None else RankGroup.over(self.ranks, timeout)
        held: RankGroup = self.obj.agreement
        if held.is_closed:
            raise SourceFailed(
                f"this {type(self.obj).__name__} has been used: the agreement of its ranks ends "
                "with the first update, check or preflight; make a new source for each"
            )
        return held

    def source(
        self,
        wanted: WantedWeights,
        *,
        group: RankGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        partial: bool = False,
    ) -> WeightSource:
        """It as a ``WeightSource`` of what is ``wanted``.

        ``group``: what ``rank_group`` returned; formed here (collectively, within ``timeout``
        seconds) when absent. What spells tensors of files otherwise (transformers' fused experts)
        is split into them; a ``WeightSource`` is returned as it is where there is nothing to split,
        and its names are the engine's. A PEFT model's adapters are merged weight by weight;
        ``partial`` leaves out what they do not change. Raises ``ConfigError`` naming the layer that
        cannot be merged; ``SourceFailed`` when there is no tensor.
        """
        if self.parts:
            group = group if group is not None else self.rank_group(timeout)
            names = {component for component, _ in self.parts}
            sources = {}
            for name, part in self.parts:
                own = wanted.beside(names - {POLICY}) if name == POLICY else wanted.of(name)
                sources[name] = part.source(own, group=group, partial=partial)
            return together(sources, group)
        if self.kind == "source":
            source = placed_source(self.obj, wanted.prefixes)
        else:
            group = group if group is not None else self.rank_group(timeout)
            before, known = wanted.prefixes, wanted.tensors.keys()
            name_of = (lambda raw: placed(file_form(raw), before)) if before else file_form
            naming = Naming(wanted.aliases, wanted.dtype, name_of, wanted.schemes, known)
            source = self._merged(naming, wanted.dtype, group, partial)
        if not wanted.spellings:
            return source
        from rollout.weight_sync.trainer.sources.spelled import (
            LocalSpelledSource,
            SpelledSource,
        )

        kind = LocalSpelledSource if isinstance(source, LocalSource) else SpelledSource
        return kind(source, wanted.spellings)

    def read(self, info: WeightInfo, group: RankGroup, *, partial: bool = False) -> Incoming:
        """Its source as the engine that announced ``info`` wants it: checked, cast, in pieces.

        Raises ``WeightMismatch`` naming components that the engine has not, and ``ConfigError``
        where it cannot take the adapters.
        """
        models = [part for part in self.components if adapter_of(part) is None]
        check_components(models, info.components)
        wanted = info.wanted
        adapters = {
            name: part.spec(wanted.adapter_prefixes)
            for component, part in self.parts
            if (name := adapter_of(component)) is not None
        }
        check_adapters(adapters, info, wanted)
        source = self.source(wanted, group=group, partial=partial)
        components = self.components
        if POLICY in components and len(info.components) > 1:  # of which it may send some, too
            known = source.metadata()
            if known is not None:
                told = [component_of(meta.name) for meta in known]
            else:
                told = list(info.due)
            components = tuple(dict.fromkeys((*components, *told)))
        return Incoming(source, wanted, components, adapters, self.merged)

    @property
    def merged(self) -> tuple[str, ...]:
        """The adapters that the policy is sent merged with, by PEFT's names."""
        if self.parts:
            return dict(self.parts)[POLICY].merged if POLICY in self.components else ()
        if self.kind == "source":
            return tuple(getattr(self.obj, "merged_adapters", ()))  # of a ``VersionSource``
        return () if self.unmerged else merged_names(self.obj)

    def spec(self, prefixes: Mapping[str, str]) -> AdapterSpec:
        """Of an adapter: what the engine is told of it."""
        raise NotImplementedError

    def calls_alone(self) -> str | None:
        """What a rank other than 0 should be told that sends what no other rank has a part in.

        None where ``obj`` is the ranks' together, a ``WeightSource``, or there is one rank alone.
        """
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return None
        if dist.get_rank() == 0 or self.kind == "source" or self.ranks is not None:
            return None
        is_iterator = isinstance(self.obj, Iterator)
        what = "an iterator" if is_iterator else f"a {type(self.obj).__name__}"
        remedy = (
            "Call update_weights on rank 0 alone, or pass what the ranks hold together (DDP, FSDP, "
            "ZeRO, DTensors)"
        )
        if is_iterator:
            remedy = (
                "One that gathers (full_tensor(), a full state dict) waits for ranks that do not "
                "iterate, without end: pass the model, or its named_parameters(), on every rank; "
                "only one that gathers nothing may be sent by rank 0 alone"
            )
        return (
            f"trainer rank {dist.get_rank()} of {dist.get_world_size()} sends {what} of its own: "
            f"every rank that does so makes a version of its own. {remedy}"
        )

    def _agreement(self) -> RankGroup | None:
        """Of components: the group of the ``WeightSource`` among them that ranks hold together."""
        shared = [
            part for _, part in self.parts if part.kind == "source" and part.obj.agreement.size > 1
        ]
        if len(shared) > 1:
            raise ConfigError(
                "one WeightSource of several ranks goes into an update: make one source of the "
                "components, or send them one by one"
            )
        return shared[0].rank_group() if shared else None

    def _merged(
        self, naming: Naming, dtype: torch.dtype, group: RankGroup, partial: bool
    ) -> WeightSource:
        """What streams it, with its adapters merged where it has any."""
        if isinstance(self.obj, nn.Module):
            from rollout.weight_sync.trainer.sources.lora import MergePlan

            model = bare_module(self.obj)
            plan = MergePlan.of(model, partial, not self.unmerged, naming.name_of)
            if plan is not None:
                from rollout.weight_sync.trainer.sources.lora import MergedSource

                inner = self.of_kind(Naming(naming.aliases, None, plan.name_of), group)
                return MergedSource(inner, plan, dtype)
        return self.of_kind(naming, group)

    def of_kind(self, naming: Naming, group: RankGroup) -> WeightSource:
        """What streams it."""
        obj = self.obj
        if self.kind == "fsdp2":
            from rollout.weight_sync.trainer.sources.fsdp2 import FSDP2Source

            return FSDP2Source(obj, naming, group)
        if self.kind == "fsdp1":
            from rollout.weight_sync.trainer.sources.fsdp1 import FSDP1Source

            return FSDP1Source(obj, naming, group)
        if self.kind == "zero3":
            from rollout.weight_sync.trainer.sources.zero import ZeroSource

            return ZeroSource(bare_module(obj), naming, group)
        if self.kind == "directory":
            from rollout.weight_sync.trainer.sources.directory import DirectorySource

            return DirectorySource(Path(obj), naming, group)
        if self.kind == "iterable":
            from rollout.weight_sync.trainer.sources.iterable import IterableSource

            return IterableSource(obj, naming, group)
        from rollout.weight_sync.trainer.sources.plain import PlainSource

        weights = bare_module(obj) if isinstance(obj, nn.Module) else obj
        items = held_by(weights, naming.wants)
        if self.ranks is None:
            from rollout.weight_sync.trainer.sources.codes import holds_codes
            from rollout.weight_sync.trainer.sources.iterable import CodesSource

            if holds_codes(items):
                return CodesSource(items, naming, group)
        return PlainSource(weights, naming, group, items)


def detect(obj: Any, *, take_first: bool = True) -> Detected:
    """Which source takes ``obj``; raises ``ConfigError`` naming the accepted kinds.

    Only the first item of an iterator tells whether ranks hold what comes together, so it is taken
    here where a job has several ranks, unless told not to; DTensors become a list.
    """
    if _are_components(obj):
        return _components(obj, take_first)
    kind = kind_of(obj)
    if kind == "iterable" and take_first and several_ranks():
        obj = _opened(obj)
        kind = kind_of(obj)
    return Detected(obj, kind, ranks_of(obj, kind))


def _are_components(obj: Any) -> bool:
    """Whether ``obj`` is ``{component: source, ...}``; a dict of tensors is the policy's."""
    return (
        isinstance(obj, Mapping)
        and bool(obj)
        and all(isinstance(value, _SOURCES) for value in obj.values())
    )


def _components(obj: Mapping[Any, Any], take_first: bool) -> Detected:
    parts = tuple((str(name), detect(obj[name], take_first=take_first)) for name in obj)
    if nested := [name for name, part in parts if part.parts]:
        raise ConfigError(
            f"component {nested[0]!r} is {{name: source}} again; pass its source, or leave it out"
        )
    return combined(parts)


def combined(parts: tuple[tuple[str, Detected], ...]) -> Detected:
    """The parts of one update, by component; ``ConfigError`` where other ranks hold some, or two
    have tensors of one component.
    """
    held, senders = {}, dict[str, str]()
    for name, part in parts:
        for component in _told(name, part):
            if (other := senders.setdefault(component, name)) != name:
                raise ConfigError(
                    f"component {component!r} comes twice, with {other!r} and with {name!r}: leave "
                    "one of them out (a MegatronSource: mtp=False)"
                )
        ranks = part.obj.agreement.ranks if part.kind == "source" else part.ranks
        if ranks is not None and (part.kind != "source" or len(ranks) > 1):
            held[tuple(ranks)] = name
    if len(held) > 1:
        who = " and ".join(f"{name!r} by ranks {list(r)}" for r, name in held.items())
        raise ConfigError(f"components of one update are held by the same ranks, not {who}")
    opened = {name: part.obj for name, part in parts}
    return Detected(opened, "components", next(iter(held), None), parts)


def _told(name: str, part: Detected) -> tuple[str, ...]:
    """The components that a part of an update has tensors of; the policy's may say further ones."""
    if name == POLICY:
        return part.components
    if part.components != (POLICY,):
        raise ConfigError(
            f"component {name!r} is a source of {', '.join(part.components)}: pass it as the "
            f"{POLICY!r}, or send {name!r} of it alone (a MegatronSource: mtp=False)"
        )
    return (name,)


def _opened(obj: Iterable[Any]) -> Any:
    """What an iterator yields: DTensors as a list, which all ranks hold together.

    Whatever it raises at its first item is raised again when the stream is read.
    """
    items = iter(obj)
    try:
        first = next(items)
    except StopIteration:
        return ()
    except Exception as error:  # noqa: BLE001 - the trainer's own, for whoever reads the stream
        return _raising(error)
    if not is_dtensor_pair(first):
        return chain((first,), items)
    try:
        return [first, *items]
    except Exception as error:
        raise SourceFailed(f"the iterable raised: {type(error).__name__}: {error}") from error


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield  # a generator
