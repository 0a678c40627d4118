"""A place in a foreign NCCL group, as vLLM's ``PyNcclCommunicator`` forms it.

NOT YET RUN: it needs two GPUs and a trainer with vLLM. The id of the communicator comes through
the trainer's ``TCPStore`` as a pickled ctypes struct, whose 128 bytes are taken out of the pickle's
opcodes: nothing is unpickled. Then everyone takes part in one all-reduce, as the trainer does.
"""

from __future__ import annotations

import ctypes
import pickletools
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.distributed.native_thread import NativeThread, on_this_stream
from rollout.errors import ConfigError, DeadlineExceeded, TransferFailed
from rollout.weight_sync.transports.foreign_group import ForeignGroup

ID_KEY = "broadcast_from/0/0"  # the first object that vLLM's StatelessProcessGroup broadcasts
ID_BYTES = 128
_UINT8, _FLOAT32, _SUM = 1, 7, 0  # ncclDataType_t, ncclRedOp_t
_POLL = 0.0005
_JOIN_POLL = 0.05


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


class NcclMember:
    """Rank ``rank`` of ``group`` on ``device``."""

    def __init__(self, group: ForeignGroup, rank: int, device: str) -> None:
        self._group, self._rank, self._device = group, rank, torch.device(device)
        self._place = f"rank {rank} of {group.size} of the group at {group.host}:{group.port}"
        self._store: Any = None
        self._comm = ctypes.c_void_p()
        self._closed, self._lock = threading.Event(), threading.Lock()
        try:
            self._nccl = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise ConfigError(f"the weight transfer needs NCCL beside CUDA: {error}") from error
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p

    def join(self, timeout: float) -> None:
        group, failed = self._group, list[Exception]()

        def run() -> None:
            try:
                with torch.cuda.device(self._device):
                    uid = _UniqueId.from_buffer_copy(unique_id(bytes(store.get(ID_KEY))))
                    made = ctypes.c_void_p()
                    into = ctypes.byref(made)
                    self._check(self._nccl.ncclCommInitRank(into, group.size, uid, self._rank))
                    with self._lock:
                        self._comm = made
                    if self._closed.is_set():  # meanwhile, when there was nothing to abort yet
                        self._abort()
                        return
                    ones = torch.zeros(1, device=self._device)
                    self._launch("ncclAllReduce", ones, _FLOAT32, _SUM)
                    torch.cuda.current_stream().synchronize()
            except (RuntimeError, TransferFailed) as error:
                failed.append(error)

        store = self._store = dist.TCPStore(
            group.host, group.port, group.size, is_master=False, timeout=timedelta(seconds=timeout)
        )
        # NCCL's own rendezvous has no deadline: this thread is left behind at ours. On the stream
        # of this one: steps must not wait for the trainer.
        thread = NativeThread("rollout-nccl-join", on_this_stream(run))
        thread.start()
        deadline = time.monotonic() + timeout
        while thread.is_alive():
            if self._closed.is_set():
                raise TransferFailed(f"{self._place}: the group was left")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{self._place}: did not form within {timeout:g} s")
            thread.join(_JOIN_POLL)
        if failed:
            raise TransferFailed(f"{self._place}: did not form: {failed[0]}")

    def receive(self, nbytes: int, timeout: float) -> Tensor:
        if self._closed.is_set():
            raise TransferFailed(f"{self._place}: the group was left")
        into = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        deadline = time.monotonic() + timeout
        with torch.cuda.device(self._device):
            self._launch("ncclBroadcast", into, _UINT8, 0)
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            while not done.query():
                if self._closed.is_set():
                    raise TransferFailed(f"{self._place}: the group was left")
                if time.monotonic() > deadline:
                    self.close()
                    raise DeadlineExceeded(
                        f"{self._place}: no broadcast of {nbytes} bytes within {timeout:g} s"
                    )
                time.sleep(_POLL)
        return into

    def is_alive(self) -> bool:
        try:
            return not self._closed.is_set() and self._store.check([ID_KEY]) is not None
        except (RuntimeError, dist.DistError):
            return False

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._abort()
        self._store = None

    def _abort(self) -> None:
        """Once: what is aborted is freed."""
        with self._lock:
            made, self._comm = self._comm, ctypes.c_void_p()
        if made:
            self._nccl.ncclCommAbort(made)

    def _launch(self, name: str, tensor: Tensor, dtype: int, argument: int) -> None:
        """An in-place collective on the current stream; ``argument``: its operator or root."""
        data = ctypes.c_void_p(tensor.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        count = ctypes.c_size_t(tensor.numel())
        call = getattr(self._nccl, name)
        self._check(call(data, data, count, dtype, argument, self._comm, stream))

    def _check(self, status: int) -> None:
        if status:
            raise TransferFailed(f"NCCL: {self._nccl.ncclGetErrorString(status).decode()}")


def unique_id(pickled: bytes) -> bytes:
    """The 128 bytes of the ``ncclUniqueId`` in a pickle; raises ``TransferFailed``."""
    try:
        found = [a for _, a, _ in pickletools.genops(pickled) if isinstance(a, bytes)]
    except ValueError as error:
        raise TransferFailed(f"the trainer's store holds no NCCL id: {error}") from error
    ids = [value for value in found if len(value) == ID_BYTES]
    if len(ids) != 1:
        raise TransferFailed("the trainer's store holds no NCCL id under " + ID_KEY)
    return ids[0]
