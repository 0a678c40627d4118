"""How much memory a rank may still take, and giving memory back for real."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import torch
from torch import Tensor


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now: of the GPU, or of this machine within its cgroup's limit."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return min(_machine_bytes(), _cgroup_bytes())


def total_bytes(device: torch.device) -> int:
    """Bytes that a GPU has; of a CPU what ``available_bytes`` says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return available_bytes(device)


def release_unused(device: torch.device) -> None:
    """Return freed memory to the device or the operating system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
        if trim is not None:
            trim(0)


def _machine_bytes() -> int:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 << 30  # no such file on this system: a cautious guess


def _cgroup_bytes() -> int:
    """What is left below the limit of the control group, version 2 or 1; page cache not counted."""
    for folder, limit_name, used_name in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _number(f"{folder}/{limit_name}"), _number(f"{folder}/{used_name}")
        if limit is not None and used is not None:
            cache = 0
            for line in _lines(f"{folder}/memory.stat"):
                if line.startswith(("inactive_file ", "active_file ")):
                    cache += int(line.split()[1])
            return max(0, limit - used + cache)
    return sys.maxsize


def _number(path: str) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Moved without a wait for what a GPU is at: only pinned memory is read that way."""
    if tensor.device == device or device.type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
