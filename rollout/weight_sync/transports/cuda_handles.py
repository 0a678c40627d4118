"""Handles of this process's GPU memory, given out for the length of one update."""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rollout.errors import TransferFailed
from rollout.weight_sync.protocol.in_place import Given
from rollout.weight_sync.transports import cuda_memory
from rollout.weight_sync.transports.cuda_memory import (
    Allocation,
    SharedAt,
    gpu_uuid,
    pack_handle,
)


class GivenHandles:
    """``secret``: the update's. ``reaches``: UUIDs of the GPUs whose memory all ranks map; none
    says an engine that does not tell.
    """

    def __init__(self, secret: str, reaches: Iterable[str] = ()) -> None:
        self.reaches = frozenset(reaches)
        self.secret, self._runtime = secret, cuda_memory.runtime()
        self._runtime.enter()
        self._starts: list[int] = []  # ascending: of the allocations whose handles were given out
        self._given: list[tuple[Allocation, str]] = []
        self._own: list[SharedAt] = []  # in ``own_handles``
        self._uuids: dict[torch.device, str] = {}

    @classmethod
    def to_look(cls, reaches: Iterable[str]) -> GivenHandles:
        """Of no update: what they find is not given out."""
        return cls(secrets.token_hex(16), reaches)

    def why_not(self, tensor: Tensor) -> str | None:
        """Why the ranks cannot read a tensor where it lies, or None."""
        if not tensor.is_contiguous():
            return "it is not contiguous"
        uuid = self._uuid(tensor.device)
        if not uuid and tensor.device.type == "cpu":
            return "it lies in host memory"
        if not uuid:
            return "its GPU has no UUID to share memory by (MIG)"
        if self.reaches and uuid not in self.reaches:
            return "it lies on a GPU that not all ranks reach"
        try:
            self._handle(tensor)
        except TransferFailed as error:
            return f"its memory cannot be mapped: {error}"
        return None

    def give(self, tensors: Sequence[Tensor]) -> Given:
        """The allocations around tensors of which ``why_not`` says nothing, and where those lie.

        What was asked of the tensors' GPUs before has been done when this returns: a rank's stream
        knows nothing of ours.
        """
        self._runtime.enter()  # on a thread of the sender's own
        handles: dict[str, int] = {}
        places = []
        for tensor in tensors:
            around, handle = self._handle(tensor)
            at = handles.setdefault(handle, len(handles))
            places.append((at, tensor.data_ptr() - around.start))
        for device in {tensor.device for tensor in tensors}:
            torch.cuda.synchronize(device)
        return Given(tuple(handles), tuple(places), tuple(tensor.dtype for tensor in tensors))

    def of_allocation(self, start: int) -> bytes:
        """CUDA's own handle of an allocation; a rank of this process finds it by that."""
        handle = self._runtime.handle(start)
        self._own.append((self.secret, handle))
        cuda_memory.own_handles()[self._own[-1]] = start
        return handle

    def close(self) -> None:
        """Ranks of this process find nothing by these any more."""
        while self._own:
            cuda_memory.own_handles().pop(self._own.pop(), None)

    def _handle(self, tensor: Tensor) -> tuple[Allocation, str]:
        """The allocation around a tensor, and its handle; ``TransferFailed`` where it has none."""
        start, size = tensor.data_ptr(), tensor.nbytes
        at = bisect_right(self._starts, start)
        if at:
            around, handle = self._given[at - 1]
            if start + size <= around.start + around.nbytes:
                return around, handle
        around = self._runtime.around(start)
        if not around.shareable:
            raise TransferFailed(
                "it is no allocation of cudaMalloc's (torch's expandable_segments have none)"
            )
        if start + size > around.start + around.nbytes:
            raise TransferFailed("it reaches over several allocations")
        with torch.cuda.device(tensor.device):
            raw = self.of_allocation(around.start)
        handle = pack_handle(self._uuid(tensor.device), around.nbytes, self.secret, raw)
        self._starts.insert(at, around.start)
        self._given.insert(at, (around, handle))
        return around, handle

    def _uuid(self, device: torch.device) -> str:
        if device not in self._uuids:
            self._uuids[device] = gpu_uuid(device)
        return self._uuids[device]
