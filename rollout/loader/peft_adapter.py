"""A LoRA adapter as PEFT saves it: ``adapter_config.json``, and its factors beside it."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.loader.expert_factors import take_experts
from rollout.weights import Box
from rollout.weights.adapters import (
    BIAS,
    BIASED,
    DORA,
    DORA_EMBEDDING,
    EMBEDDING,
    EMBEDDING_A,
    EMBEDDING_B,
    LINEAR,
    MAGNITUDE,
    NORMED,
    A,
    AdapterSpec,
    B,
    ModuleSpec,
)
from rollout.weights.files import AsTheyWere, open_weights, why_unwritten
from rollout.weights.names import placed

MAX_RANK = 1024
ADAPTER_DIRECTORY = (
    "a directory that PEFT's save_pretrained has written: adapter_config.json, and "
    "adapter_model.safetensors beside it"
)
# What starts otherwise (PiSSA, OLoRA, CorDA, LoftQ ...) has changed the weights it is added to.
STARTS_BESIDE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_PREFIX = "base_model.model."
# What changes the arithmetic, and is not done here: such an adapter is refused by the setting.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
    "init_lora_weights": STARTS_BESIDE,
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """``tensors``: what ``spec`` says of its modules, as an ``AdapterModel`` loads it."""

    spec: AdapterSpec
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> PeftAdapter:
        """Raises ``ConfigError`` naming what is missing or not supported."""
        if not os.path.isdir(path):  # pathlib raises where a name is too long to be one
            raise ConfigError(f"{path!s:.300} is not a directory; give {ADAPTER_DIRECTORY}")
        weights = sorted(path.glob("*.safetensors"))
        as_they_were = AsTheyWere([path / "adapter_config.json", *weights])
        settings = _settings(path)
        _, files = open_weights(path, "safetensors", mapped=False)
        with closing(files):
            if why := next(filter(None, map(why_unwritten, weights)), ""):
                raise ConfigError(why)
            metas = files.metadata().values()
            found = {meta.name: files.read(meta.name, Box.full(meta.shape)) for meta in metas}
        as_they_were.check()
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in found.items()}
        modules, experts = take_experts(
            tensors,
            settings.get("target_parameters") or (),
            lambda name: int(_pattern(settings, "rank_pattern", name, "r")),
            lambda name, rank: _scaling(settings, name, rank),
            path,
        )
        if tensors or not modules:
            ranks = _ranks(tensors, path, DORA if settings.get("use_dora") else LINEAR)
            for name, (rank, kind) in ranks.items():
                scaling = _scaling(settings, name, rank)
                modules[name] = ModuleSpec(rank=rank, scaling=scaling, kind=kind)
        return cls(AdapterSpec(modules=modules), tensors | experts)

    def placed(self, prefixes: Mapping[str, str]) -> PeftAdapter:
        """By the names of an engine that knows ``prefixes`` before them (``weights.names.placed``);
        what it does not take keeps its own.
        """
        modules = {
            (placed(f"{module}.weight", prefixes) or module).removesuffix(".weight"): spec
            for module, spec in self.spec.modules.items()
        }
        tensors = {placed(key, prefixes) or key: tensor for key, tensor in self.tensors.items()}
        return PeftAdapter(AdapterSpec(modules=modules), tensors)

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """The tensor ``name`` of a checkpoint with what is added to it, by PEFT's own arithmetic:
        the same bits as its ``merge()`` for float32 factors.
        """
        with torch.autocast("cpu", enabled=False):  # a caller's would round the products
            return self._merged(name, weight)

    def _merged(self, name: str, weight: Tensor) -> Tensor:
        module = name.removesuffix(".weight")
        spec = self.spec.modules.get(module)
        if spec is None:
            return weight
        if spec.kind in (EMBEDDING, DORA_EMBEDDING):
            down, up = self.tensors[module + EMBEDDING_A], self.tensors[module + EMBEDDING_B]
            delta = (up.float() @ down.float()).T * spec.scaling
            adapted = weight + delta.to(weight.dtype)
            if spec.kind == EMBEDDING:
                return adapted
            gain = self.tensors[module + MAGNITUDE] / torch.linalg.norm(adapted, dim=0)
            turned: Tensor = gain * adapted
            return turned.to(weight.dtype)
        down, up = self.tensors[module + A], self.tensors[module + B]
        delta = ((up.float() @ down.float()) * spec.scaling).to(weight.dtype)
        if spec.kind == LINEAR:
            return weight + delta
        adapted = weight + delta
        norms = torch.linalg.norm(adapted, dim=1)
        magnitude = self.tensors[module + MAGNITUDE]
        scaled: Tensor = adapted * (magnitude / norms)[:, None]
        return scaled.to(weight.dtype)


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads((path / "adapter_config.json").read_text())
        rank = int(settings["r"])
        float(settings["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no PEFT adapter_config.json: {error}") from error
    if settings.get("peft_type") != "LORA" or not 1 <= rank <= MAX_RANK:
        raise ConfigError(f"{path} is no LoRA adapter of rank 1 to {MAX_RANK}")
    for name, plain in _PLAIN.items():
        if settings.get(name) not in plain:
            raise ConfigError(
                f"{path} has {name}={settings[name]!r:.80}, which is not merged here, nor "
                "served beside the weights; send the trainer's PEFT model by update_weights"
            )
    return dict(settings)


def _scaling(settings: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = _pattern(settings, "alpha_pattern", module, "lora_alpha")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _pattern(settings: Mapping[str, Any], patterns: str, module: str, default: str) -> float:
    """``patterns`` are PEFT's: of names, or the ends of names, as regular expressions."""
    try:
        for pattern, value in (settings.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return float(value)
    except (re.error, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{patterns} of adapter_config.json is not PEFT's: {error}") from error
    return float(settings[default])


def _ranks(found: Mapping[str, Tensor], path: Path, kind: str) -> dict[str, tuple[int, str]]:
    """Of each module its rank, and its ``ModuleSpec.kind``; ``kind``: of linears."""
    ranks, known = {}, set[str]()
    for key, down in found.items():
        first = next((end for end in (A, EMBEDDING_A) if key.endswith(end)), None)
        if first is None:
            continue
        stem = key.removesuffix(first)
        of, second = (kind, B) if first == A else (EMBEDDING, EMBEDDING_B)
        if first == EMBEDDING_A and kind == DORA:
            of = DORA_EMBEDDING
        up = found.get(stem + second)
        if up is None or down.dim() != 2 or up.dim() != 2 or up.shape[1] != down.shape[0]:
            raise ConfigError(f"{path}: {key} has no {second[1:]} that fits it")
        if not 1 <= len(down) <= MAX_RANK:
            raise ConfigError(f"{path}: {key} has rank {len(down)}, not 1 to {MAX_RANK}")
        known |= {key, stem + second}
        if stem + BIAS in found:
            if found[stem + BIAS].shape != up.shape[:1] or of != LINEAR:
                raise ConfigError(f"{path}: {stem + BIAS} does not fit {stem + B}")
            of = BIASED
            known.add(stem + BIAS)
        if of in NORMED:
            magnitude = found.get(stem + MAGNITUDE)
            if magnitude is None or magnitude.shape != up.shape[:1]:
                raise ConfigError(f"{path}: {key} has no {MAGNITUDE[1:]} that fits it")
            known.add(stem + MAGNITUDE)
        ranks[stem] = len(down), of
    other = sorted(found.keys() - known)
    if other or not ranks:
        hint = ""
        if other and ".base_layer." in other[0]:
            hint = "save_pretrained(..., save_embedding_layers=False) leaves it out; or "
        raise ConfigError(
            f"{path} holds {other[0] if other else 'no factors'}: the factors of LoRA and DoRA "
            f"alone are read from files (no weights); {hint}send the trainer's "
            "PEFT model by update_weights"
        )
    return ranks
