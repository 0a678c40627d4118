"""What one update is of: a policy, components, and adapters beside them or by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from rollout.config import DEFAULT_TIMEOUT
from rollout.errors import ConfigError, some
from rollout.loader.peft_adapter import PeftAdapter
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.adapters import (
    Adapter,
    AdapterPlan,
    adapter_names,
    is_adapted,
    tuner_layers,
)
from rollout.weight_sync.trainer.sources.base import WeightSource
from rollout.weight_sync.trainer.sources.detect import Detected, combined, detect
from rollout.weight_sync.trainer.sources.kinds import bare_module, ranks_of_whole
from rollout.weight_sync.trainer.sources.known_adapters import KnownAdapters
from rollout.weight_sync.trainer.sources.names import Naming
from rollout.weights.adapters import AdapterSpec
from rollout.weights.components import POLICY, adapter_component
from rollout.weights.names import placed
from rollout.weights.wanted import WantedWeights


def own_adapters(obj: Any) -> dict[str, Any]:
    """``obj``, a PEFT model, under the name of each of its active adapters."""
    module = bare_module(obj) if isinstance(obj, nn.Module) else None
    active = adapter_names(module)[1] if module is not None and is_adapted(module) else ()
    if not active:
        raise ConfigError(
            f"adapters_only=True takes a PEFT model with an active adapter, got a "
            f"{type(obj).__name__}; or pass adapters={{name: PEFT model or directory}}"
        )
    return dict.fromkeys(active, obj)


def detect_update(
    obj: Any, adapters: Mapping[str, Any], known: KnownAdapters | None = None
) -> Detected:
    """Which source takes ``obj`` (None: no model's weights), with ``adapters`` by name beside it.

    A PEFT model that is ``obj`` and an adapter, too, goes unmerged, whatever either is wrapped in.
    ``known``: plans of the updates before.
    """
    known = known or KnownAdapters()
    if not adapters:
        return detect(obj)
    if not isinstance(adapters, Mapping):
        raise ConfigError(
            f"adapters must map names to PEFT models or directories, got {adapters!r:.80}"
        )
    beside = tuple(_detected(name, source, obj is None, known) for name, source in adapters.items())
    if obj is None:
        return combined(beside)
    found = detect(obj)
    own = {id(layer) for source in adapters.values() for layer in tuner_layers(source)}
    parts = tuple(
        (component, replace(part, unmerged=not own.isdisjoint(map(id, tuner_layers(part.obj)))))
        for component, part in found.parts or ((POLICY, found),)
    )
    return combined(parts + beside)


def _detected(
    name: str, obj: Any, alone: bool, known: KnownAdapters
) -> tuple[str, DetectedAdapter]:
    if isinstance(obj, PeftAdapter):
        return adapter_component(name), DetectedAdapter(obj, "files", None, alone=alone)
    module = bare_module(obj) if isinstance(obj, nn.Module) else None
    if module is not None and isinstance(name, str) and (seen := known.find(module, name)):
        return adapter_component(name), DetectedAdapter(
            obj, "plain", ranks_of_whole(obj), adapter=seen.adapter, alone=alone, plans=seen.plans
        )
    adapter = Adapter.of(name, obj, module)
    if not adapter.peft_name:
        files = PeftAdapter.read(adapter.obj)
        return adapter.component, DetectedAdapter(files, "files", None, alone=alone)
    found, plans = detect(obj), []
    if found.kind == "plain" and module is not None:
        plans = known.keep(module, name, adapter.peft_name)
    return adapter.component, DetectedAdapter(
        obj, found.kind, found.ranks, adapter=adapter.peft_name, alone=alone, plans=plans
    )


@dataclass(frozen=True, slots=True)
class DetectedAdapter(Detected):
    """One adapter: its factors alone are looked at, gathered and sent.

    ``adapter``: PEFT's name of it. ``alone``: no model's weights go with it.
    """

    adapter: str = ""
    alone: bool = True
    plans: list[tuple[Mapping[str, str], AdapterPlan]] = field(default_factory=list)

    def spec(self, prefixes: Mapping[str, str]) -> AdapterSpec:
        if isinstance(self.obj, PeftAdapter):
            modules = self.obj.spec.modules
            return AdapterSpec(modules={_placed(m, prefixes): s for m, s in modules.items()})
        return self._plan(prefixes).spec

    def source(
        self,
        wanted: WantedWeights,
        *,
        group: RankGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        partial: bool = False,
    ) -> WeightSource:
        """As ``Detected.source``."""
        from rollout.weight_sync.trainer.sources.plain import PlainSource

        group = group if group is not None else self.rank_group(timeout)
        dtype, prefixes = wanted.dtype, wanted.prefixes
        if isinstance(self.obj, PeftAdapter):
            naming = Naming({}, dtype, lambda raw: placed(raw, prefixes))
            return PlainSource(dict(self.obj.tensors), naming, group)
        plan = self._plan(prefixes)
        if self.kind == "plain":
            return PlainSource(plan.named, Naming({}, dtype, lambda name: name), group)
        return self.of_kind(Naming({}, dtype, plan.name_of), group)

    def _plan(self, prefixes: Mapping[str, str]) -> AdapterPlan:
        """Made once, as long as nothing changes the module's layers."""
        plan = next((plan for known, plan in self.plans if known == prefixes), None)
        if plan is None:
            plan = AdapterPlan(bare_module(self.obj), self.adapter, prefixes)
            self.plans[:] = [(dict(prefixes), plan)]
        if self.alone and plan.trained_beside:
            raise ConfigError(
                f"{some(plan.trained_beside, 4)}: trained beside the adapter, which does not "
                "hold it; send the base, too: update_weights(model, adapters={name: model})"
            )
        if self.alone and plan.start is not None:
            raise ConfigError(
                f"adapter {self.adapter!r} began by changing the base (init_lora_weights="
                f"{plan.start!r}); send the base, too: update_weights(model, adapters={{name: "
                "model}); or, where the engine holds the base as it was left then, set "
                "init_lora_weights to True in the model's peft_config"
            )
        return plan


def _placed(module: str, prefixes: Mapping[str, str]) -> str:
    found = placed(f"{module}.weight", prefixes)
    if found is None:
        raise ConfigError(f"{module}: the engine has no such module; leave it out of the adapter")
    return found.removesuffix(".weight")
