"""Every implementation of an op as something that takes tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollout.kernels.op import Op


def backends(op: Op[Any, Any]) -> dict[str, Callable[..., Any]]:
    """By name; Triton's runs in its interpreter, or on the card where there is one."""
    found = dict(op.implementations())
    if "triton" in found and torch.cuda.is_available():
        found["triton"] = _on_the_card(found["triton"])
    return found


def _on_the_card(run: Callable[..., Any]) -> Callable[..., Any]:
    def moved(*arguments: Any) -> Any:
        there = [x.cuda() if isinstance(x, Tensor) else x for x in arguments]
        result = run(*there)
        for here, x in zip(arguments, there, strict=True):
            if isinstance(here, Tensor):
                here.copy_(x)  # what was written in place
        if isinstance(result, tuple):
            return tuple(x.cpu() for x in result)
        return result.cpu() if isinstance(result, Tensor) else result

    return moved
