"""A model of transformers' modules, made without reading its weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from rollout.models.transformers_backend.interface import NAME, register
from rollout.weights.names import weight_dtype

_without_memory = threading.local()
_constructing = threading.Lock()


def construct(
    kind: type[Any],
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = NAME,
    hollow: bool = False,
) -> nn.Module:
    """The model with parameters that nobody has filled; what is computed of the config is there.

    ``attention``: the implementation, ours or their own. ``hollow``: parameters have no memory.
    """
    register()
    without = _parameters_without_memory() if hollow else nullcontext()
    with unfilled(device), without:
        model: Any = kind._from_config(config, attn_implementation=attention, dtype=dtype)
        model.tie_weights()
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # which reads all ids
            module.__dict__["warn_if_padding_and_no_attention_mask"] = _unwarned
    if device.type == "meta" and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the one whose shapes need no values
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(weight_dtype(name, dtype))
    done: nn.Module = model.eval()
    return done


@contextmanager
def unfilled(device: torch.device) -> Iterator[None]:
    """Modules of transformers that are made within, on ``device``, have parameters that nobody has
    filled. One thread at a time: transformers sets the initialisers and the default dtype of the
    process, and puts back what it has found.
    """
    from transformers.initialization import no_init_weights

    with _constructing, torch.device(device), no_init_weights():
        yield


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """What this thread registers as a parameter within lies on ``meta`` from then on."""
    _watch_parameters()
    _without_memory.is_so = True
    try:
        yield
    finally:
        _without_memory.is_so = False


@cache
def _watch_parameters() -> None:
    """Once for the process: threads that register others may be reading torch's list of hooks."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if not getattr(_without_memory, "is_so", False):
            return None
        if parameter is None or parameter.is_meta:  # a tied one stays the same
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    register_module_parameter_registration_hook(move)


def _unwarned(*args: Any) -> None:
    """There is no padding."""
