"""A transformers model and the engine's of the same weights, side by side in this process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.models.build import build_model
from rollout.models.causal_lm import CausalLM
from rollout.models.config import ModelConfig
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.trainer.lockstep import agreed_source
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.wire.frames import dtype_from_name


def plain_model(reference: Any, dtype: torch.dtype) -> nn.Module:
    """``reference``, or the transformers model of that directory, in ``dtype``."""
    if isinstance(reference, nn.Module):
        return reference
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(str(reference), dtype=dtype)
    return model.eval()


def rebuilt_model(
    directory: Path,
    info: WeightInfo,
    reference: Any,
    head_dtype: str,
    timeout: float,
    deterministic: bool = False,
) -> CausalLM:
    """The engine's model, on this process's CPU, with the weights that both sides have.

    ``info``: the engine's; ``head_dtype``, ``deterministic``: its settings. ``ConfigError`` for
    what cannot be compared layer by layer.
    """
    config = ModelConfig.from_directory(directory)
    head = None if head_dtype == "auto" else dtype_from_name(head_dtype)
    model = build_model(
        config,
        TensorParallel(),
        info.dtype,
        "cpu",
        "auto",
        head_dtype=head,
        deterministic=deterministic,
    )
    if not isinstance(model, CausalLM) or config.recurrent_layers:
        raise ConfigError(
            f"diagnose compares layers of models that run natively: {config.architecture} does "
            "not, or has recurrent layers; `rollout check --against` compares its weights"
        )
    model.load_weights(tensors_of(reference, info, timeout))
    return model


def tensors_of(reference: Any, info: WeightInfo, timeout: float) -> list[tuple[str, Tensor]]:
    """The reference's tensors in file form and the engine's dtype, copied where it may change."""
    found = detect(reference)
    with closing(found.rank_group(timeout)) as group:
        source = agreed_source(found, info, group, timeout)
        return [(piece.name, piece.values.clone()) for piece in source.pieces()]
