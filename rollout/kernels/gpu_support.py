"""Whether the Triton kernels can run here; imports no Triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

ASSUMED_SMS = 132  # streaming multiprocessors of a Hopper, where no device can be asked
INTERPRETED_SMS = 8  # the interpreter runs one program after the other


@functools.cache
def triton_runs() -> bool:
    """Triton is installed, and a CUDA device is there or its interpreter is on (CPU tensors)."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.is_available() or interpreted()


def interpreted() -> bool:
    """Whether kernels defined now run in Triton's interpreter, that is, in numpy."""
    triton: Any = importlib.import_module("triton")
    return bool(triton.knobs.runtime.interpret)


def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at least; compiled for no device, those of a Hopper."""
    if device.type != "cuda":
        return INTERPRETED_SMS if interpreted() else ASSUMED_SMS
    return _count(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _count(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel's launch may begin before the kernel in front of it has ended (programmatic
    dependent launch, from compute capability 9.0 on).
    """
    if device.type != "cuda" or interpreted():
        return False
    return bool(torch.cuda.get_device_properties(device).major >= 9)
