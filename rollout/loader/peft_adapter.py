"""A LoRA adapter as PEFT saves it: ``adapter_config.json``, and its factors beside it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights import Box
from rollout.weights.adapters import A, AdapterSpec, B, ModuleSpec
from rollout.weights.files import open_weights

MAX_RANK = 1024
ADAPTER_DIRECTORY = (
    "a directory that PEFT's save_pretrained has written: adapter_config.json, and "
    "adapter_model.safetensors beside it"
)
_PREFIX = "base_model.model."
# What changes the arithmetic, and is not done here: such an adapter is refused by the setting.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    # What starts otherwise (PiSSA, OLoRA, CorDA, LoftQ ...) has changed the weights it is added to.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal", "mica"),
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
    """``factors``: A [rank, in] and B [out, rank] by module, as checkpoints name it."""

    spec: AdapterSpec
    factors: Mapping[str, tuple[Tensor, Tensor]]

    @classmethod
    def read(cls, path: Path) -> PeftAdapter:
        """Raises ``ConfigError`` naming what is missing or not supported."""
        settings = _settings(path)
        _, files = open_weights(path, "safetensors", mapped=False)
        with closing(files):
            metas = files.metadata().values()
            found = {meta.name: files.read(meta.name, Box.full(meta.shape)) for meta in metas}
        factors = _pairs(found, path)
        modules = {
            name: ModuleSpec(rank=len(down), scaling=_scaling(settings, name, len(down)))
            for name, (down, _) in factors.items()
        }
        return cls(AdapterSpec(modules=modules), factors)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, as an ``AdapterModel`` loads it."""
        for name, (down, up) in self.factors.items():
            yield name + A, down
            yield name + B, up

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """The tensor ``name`` of a checkpoint with what is added to it, by PEFT's own arithmetic:
        the same bits as its ``merge()`` for float32 factors.
        """
        module = name.removesuffix(".weight")
        if module not in self.factors:
            return weight
        down, up = self.factors[module]
        delta = (up.float() @ down.float()) * self.spec.modules[module].scaling
        return weight + delta.to(weight.dtype)


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory; give {ADAPTER_DIRECTORY}")
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
    """``alpha_pattern`` is PEFT's: of names, or the ends of names, as regular expressions."""
    alpha = float(settings["lora_alpha"])
    try:
        for pattern, value in (settings.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = float(value)
                break
    except (re.error, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"alpha_pattern of adapter_config.json is not PEFT's: {error}") from error
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _pairs(found: Mapping[str, Tensor], path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    pairs = {}
    for key, down in found.items():
        if key.endswith(A):
            stem = key.removesuffix(A)
            up = found.get(stem + B)
            if up is None or down.dim() != 2 or up.dim() != 2 or up.shape[1] != down.shape[0]:
                raise ConfigError(f"{path}: {key} has no {B[1:]} that fits it")
            if not 1 <= len(down) <= MAX_RANK:
                raise ConfigError(f"{path}: {key} has rank {len(down)}, not 1 to {MAX_RANK}")
            pairs[stem.removeprefix(_PREFIX)] = (down, up)
    other = sorted(key for key in found if not key.endswith((A, B)))
    if other or not pairs:
        raise ConfigError(
            f"{path} holds {other[0] if other else 'no factors'}: plain LoRA alone is read from "
            "files (no embeddings, no stacked experts); send the trainer's PEFT model by "
            "update_weights, which merges it"
        )
    return pairs
