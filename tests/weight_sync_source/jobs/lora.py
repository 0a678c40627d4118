"""A small decoder with LoRA adapters that do something; the same bits in every process."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from weight_sync_source.jobs.tiny import Tiny


def adapted(dtype: torch.dtype = torch.float32, **settings: Any) -> PeftModel:
    """``Tiny``, untied, adapted as ``LoraConfig(**settings)`` says; no factor is zero."""
    settings = {"r": 4, "target_modules": ["up_proj", "down_proj"], **settings}
    model = get_peft_model(Tiny(tied=False).to(dtype), LoraConfig(**settings))
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape))
    return model


def merged(model: PeftModel, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What PEFT itself makes of ``model`` (and spoils it by), without derived entries, cast."""
    state = model.merge_and_unload().state_dict()
    state.pop("model.inv_freq")
    return {name: tensor.detach().to(dtype) for name, tensor in state.items()}


def factors(model: PeftModel, adapter: str = "default") -> dict[str, Tensor]:
    """What PEFT itself would save of an adapter, under the names of checkpoints."""
    state = get_peft_model_state_dict(model, adapter_name=adapter)
    return {name.removeprefix("base_model.model."): t.detach() for name, t in state.items()}
