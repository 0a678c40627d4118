"""C code for ops on CPU: compiled at first use, loaded with ctypes, and never required.

Every pointer handed to C belongs to a tensor the caller keeps alive; the interpreter lock is
released meanwhile. C gets the number of threads as an argument and runs them in torch's pool.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from rollout.errors import WeightMismatch
from rollout.kernels.native.build import BuildError, load
from rollout.kernels.native.prototypes import bind

_log = logging.getLogger(__name__)

_HUGE_PAGE = 2 << 20  # bytes

INSTRUCTIONS = ("this CPU's least", "AVX2", "AVX512", "AVX512 with bf16", "Arm")

#: bfloat16 flag of the dtypes that C knows; others run the reference
BF16 = {torch.float32: 0, torch.bfloat16: 1}


def library() -> ctypes.CDLL | None:
    """The compiled kernels, built by the first call; None where they cannot be."""
    return _load()[0]


def native_status() -> str:
    """One line for people: which code the CPU ops run, and why."""
    return _load()[1]


@functools.cache
def entry(name: str) -> Callable[..., Any]:
    """The C function ``rollout_<name>``, whose arguments are as its C prototype says."""
    lib = library()
    assert lib is not None, f"{name} was asked of a machine without native kernels"
    return bind(lib, name)


def use_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for large pages below a tensor that nothing has touched yet: fewer TLB misses."""
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type == "cpu" and size >= _HUGE_PAGE and library() is not None:
        entry("use_huge_pages")(tensor.data_ptr(), size)


def memory_fault(tensor: torch.Tensor) -> str | None:
    """Why the elements of ``tensor`` do not all lie in memory of this process, or None."""
    freed = "holds no memory: its storage was freed (resize_(0)), or it stands for another tensor"
    if not tensor.numel():
        return None
    try:
        storage = tensor.untyped_storage()
        size, address = storage.nbytes(), storage.data_ptr()
    except RuntimeError:  # a wrapper of other tensors
        return freed
    if tensor.is_contiguous():
        spans = tensor.numel() - 1
    else:
        spans = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + spans + 1) * tensor.element_size()
    return None if address and end <= size else freed


def address(tensor: torch.Tensor) -> int:
    """``data_ptr`` for native code that reads a tensor from elsewhere.

    Raises ``WeightMismatch`` where there is no memory behind it: whoever takes tensors in has to
    check them, and says which one it is; here the process is kept alive.
    """
    if (fault := memory_fault(tensor)) is not None:
        raise WeightMismatch(f"a tensor of shape {tuple(tensor.shape)} {fault}")
    return tensor.data_ptr()


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    try:
        lib, how = load()
    except BuildError as error:
        status = f"plain torch: native kernels could not be built ({error})"
        _log.warning("CPU kernels run in %s", status)
        return None, status
    return lib, f"native: {how}; {_instructions(lib)}"


def _instructions(lib: ctypes.CDLL) -> str:
    """What the library was compiled for."""
    kind = INSTRUCTIONS[lib.rollout_instructions()]
    return f"instructions of {kind}, vectors of {32 * lib.rollout_vector_width()} bits"
