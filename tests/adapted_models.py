"""A checkpoint's model with a LoRA adapter, the same bits in every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def adapted(base: Path, seed: int, **settings: Any) -> PeftModel:
    """``seed``: of what the adapter does."""
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], **settings}
    return shaken(
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**settings)), seed
    )


def shaken(model: PeftModel, seed: int) -> PeftModel:
    """As after a step of training, whose outcome ``seed`` names."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter *= 0.7 + 0.6 * torch.rand_like(parameter)
            elif "lora_" in name:
                parameter.normal_(std=0.2)
    return model
