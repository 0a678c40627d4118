"""Collectives of ranks on one machine's CPUs through memory they share, instead of sockets.

    executor:  create_shared(size) -> fd, passed to every rank as it is spawned
    each rank: share_memory(gloo group, fd, ...) -> SharedMemoryGroup, or gloo where that cannot be

The memory has no name anywhere: it is gone with the last process that maps it. How the ranks meet
in it is told in ``kernels/native/collective.c``.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rollout.kernels import native

SLOT = 256 << 10  # bytes of one exchange; longer tensors are cut
MAX_RANKS = 64

_LINE = 64  # bytes of one rank's counters
_SPIN = 50_000  # ns: a few times what sleeping and waking costs

_log = logging.getLogger(__name__)


def create_shared(size: int) -> int | None:
    """A descriptor of the memory for ``size`` ranks, for them to inherit and the caller to close.

    None where there is no such memory (not Linux, no room): the ranks then use their sockets.
    """
    if size > MAX_RANKS or not hasattr(os, "memfd_create"):
        return None
    fd = -1
    try:
        fd = os.memfd_create("rollout-ranks", os.MFD_CLOEXEC)
        os.ftruncate(fd, _length(size))
    except OSError as error:
        _log.warning("the ranks share no memory and use sockets: %s", error)
        if fd >= 0:
            os.close(fd)
        return None
    return fd


def close_shared(fds: Iterable[int | None]) -> None:
    for fd in fds:
        if fd is not None:
            os.close(fd)


def share_memory(group: Any, fd: int | None, rank: int, size: int, timeout: float) -> Any:
    """``group`` with its collectives moved into the memory behind ``fd``, which is closed here.

    Collective over ``group``: all ranks move or none does, whoever lacks the memory or a compiler.
    A rank that waits longer than ``timeout`` seconds in one collective raises ``TimeoutError``.
    """
    memory = None if fd is None else _map(fd, size)
    if native.library() is None:
        memory = None
    votes = torch.tensor([0 if memory is None else 1])
    group.allreduce([votes]).wait()
    if memory is None or int(votes) < size:
        return group
    return SharedMemoryGroup(memory, rank, size, timeout, group)


class SharedMemoryGroup:
    """The part of a raw process group that ``TensorParallel`` uses; all ranks call in one order.

    Sums of float32 and bfloat16 are taken in float32 in the order of the ranks: the same bits on
    all of them and in every run. Other dtypes are summed by ``other``. A collective is complete
    when its call returns; ``wait`` is there for the shared face.
    """

    def __init__(self, memory: Tensor, rank: int, size: int, timeout: float, other: Any) -> None:
        self._memory, self._rank, self._size = memory, rank, size
        #: whether float32 is summed as ``TensorParallel.tree_sum`` promises
        self.adds_by_tree = size in (1, 2, 4)
        self._timeout, self._other = timeout, other
        self._broken: str | None = None
        spin = _SPIN if len(os.sched_getaffinity(0)) >= size else 0
        self._place = (memory.data_ptr(), rank, size, SLOT, spin, int(timeout * 1e9))
        self._sum = native.entry("group_sum")
        self._gather = native.entry("group_gather")

    def allreduce(self, tensors: list[Tensor]) -> SharedMemoryGroup:
        """Sum each of ``tensors`` over the ranks, in place, as ``adds_by_tree`` says."""
        for tensor in tensors:
            bf16 = native.BF16.get(tensor.dtype)
            if bf16 is None:
                self._other.allreduce([tensor]).wait()
                continue
            dense = tensor.contiguous()
            self._check(self._sum(*self._usable(), dense.data_ptr(), dense.numel(), bf16))
            if dense is not tensor:
                tensor.copy_(dense)
        return self

    def gather_last(self, tensor: Tensor) -> Tensor:
        """Every rank's equal-shaped ``tensor``, side by side along the last dimension."""
        dense, columns = tensor.contiguous(), tensor.shape[-1]
        out = dense.new_empty(*tensor.shape[:-1], columns * self._size)
        rows = dense.numel() // columns if columns else 0
        row_bytes = columns * dense.element_size()
        place = self._usable()
        self._check(self._gather(*place, dense.data_ptr(), rows, row_bytes, out.data_ptr()))
        return out

    def wait(self) -> None:
        """Nothing is under way."""

    def _usable(self) -> tuple[int, ...]:
        if self._broken is not None:
            raise TimeoutError(self._broken)
        return self._place

    def _check(self, late: int) -> None:
        """``late``: the rank that did not come, or -1. Afterwards the ranks are out of step."""
        if late >= 0:
            self._broken = (
                f"rank {self._rank} waited {self._timeout:g} s in a collective for rank {late}, "
                "which hangs or is gone; the engine must be started again"
            )
            raise TimeoutError(self._broken)


def _length(size: int) -> int:
    """Bytes of the mapping: the counters in whole pages, then two slots for each rank."""
    head = -(-size * _LINE // 4096) * 4096
    return int(head + 2 * size * SLOT)


def _map(fd: int, size: int) -> Tensor | None:
    """The memory as bytes that live as long as the tensor; None where it cannot be mapped."""
    try:
        mapped = mmap.mmap(fd, _length(size))
    except (OSError, ValueError) as error:
        _log.warning("cannot map the ranks' memory, using sockets: %s", error)
        return None
    finally:
        os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8)
