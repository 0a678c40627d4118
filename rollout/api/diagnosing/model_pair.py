"""A transformers model and the engine's of the same weights, side by side in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.models.build import build_model
from rollout.models.causal_lm import CausalLM
from rollout.models.config.model import ModelConfig
from rollout.models.config.overrides import overridden
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.trainer.lockstep import agreed_source
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weights.components import POLICY, component_of
from rollout.wire.frames import dtype_from_name


def plain_model(
    reference: Any, dtype: torch.dtype, overrides: Mapping[str, Any] | None = None
) -> nn.Module:
    """``reference``, or the transformers model of that directory, in ``dtype``; ``overrides``
    replace fields of its config.
    """
    if isinstance(reference, nn.Module):
        return reference
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    given: dict[str, Any] = {}
    vision = ModelConfig.from_directory(reference, overrides=overrides).vision
    auto: Any = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
    if overrides:
        values = json.loads((Path(reference) / "config.json").read_text(encoding="utf-8"))
        kind = type(AutoConfig.from_pretrained(str(reference)))
        given["config"] = kind.from_dict(overridden(values, overrides))
    model: nn.Module = auto.from_pretrained(str(reference), dtype=dtype, **given)
    return model.eval()


def rebuilt_model(
    directory: Path,
    info: WeightInfo,
    reference: Any,
    settings: Mapping[str, Any],
    timeout: float,
) -> CausalLM:
    """The engine's model, on this process's CPU, with the weights that both sides have.

    ``info``: the engine's; ``settings``: its ``layer_settings``. ``ConfigError`` for what cannot
    be compared layer by layer.
    """
    if scheme := settings.get("quantization"):
        raise ConfigError(
            f"the engine holds its weights in {scheme}, which rounds more than any fault that a "
            "comparison of layers could name: `rollout check --against` compares the weights, and "
            "an engine without quantization the layers"
        )
    if kind := settings.get("kv_cache_dtype"):
        raise ConfigError(
            f"the engine keeps keys and values as {kind}, which rounds more than any fault that a "
            "comparison of layers could name: compare an engine with kv_cache_dtype=auto"
        )
    if (path := settings.get("module_map")) is not None:
        raise ConfigError(
            f"the engine runs modules of {path} (module_map), which are not compared layer by layer"
        )
    config = ModelConfig.from_directory(directory, overrides=settings.get("hf_overrides"))
    head = settings.get("head_dtype")
    model = build_model(
        config,
        TensorParallel(),
        info.dtype,
        "cpu",
        settings.get("weight_layout", "auto"),
        max_model_len=settings.get("max_model_len"),
        head_dtype=None if head is None else dtype_from_name(head),
        deterministic=settings.get("deterministic", False),
    )
    if not isinstance(model, CausalLM) or config.recurrent_layers:
        raise ConfigError(
            f"diagnose compares layers of models that run natively: {config.architecture} does "
            "not, or has recurrent layers; `rollout check --against` compares its weights"
        )
    tensors = tensors_of(reference, info, timeout)
    model.load_weights((n, value) for n, value in tensors if component_of(n) == POLICY)
    return model


def tensors_of(reference: Any, info: WeightInfo, timeout: float) -> list[tuple[str, Tensor]]:
    """The reference's tensors in file form and the engine's dtype, copied where it may change."""
    found = detect(reference)
    with closing(found.rank_group(timeout)) as group:
        source = agreed_source(found, info, group, timeout)
        return [(piece.name, piece.values.clone()) for piece in source.pieces()]
