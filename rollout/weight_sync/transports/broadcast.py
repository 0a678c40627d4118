"""Buckets broadcast over a process group formed between independently started jobs.

Group rank 0 is the trainer's sender, rank r + 1 is engine rank r. The same code runs on gloo and
NCCL; the backend follows the engine's device. The group lives as long as one update, so a failed
one leaves no half-open communicator behind.

Before each payload goes a preamble of fixed size, (index, nbytes): gloo ends the whole process
when a message is longer than its receive, so a rank must know what comes before it posts one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollout.distributed import LOOPBACK, Rendezvous, RendezvousServer, join_group
from rollout.errors import DeadlineExceeded, TransferFailed
from rollout.updates import BucketHeader, SharedBuckets, WeightChannel, WeightInfo
from rollout.weight_sync.bucket import check_size
from rollout.weight_sync.transports.cuda_ipc import gpu_uuid
from rollout.weight_sync.transports.group import drop, explained

_POLL = 0.0005  # seconds between looks at a pending receive


class BroadcastSender:
    """Listens for the engine's ranks and broadcasts each bucket to all of them."""

    name = "broadcast"

    def __init__(self, info: WeightInfo, timeout: float, host: str = LOOPBACK) -> None:
        backend = choose_backend(info.device, torch.cuda.is_available(), shares_gpu(info.devices))
        size = info.tensor_parallel_size + 1
        self._server = RendezvousServer(size, backend, host, timeout)
        self._group: Any = None
        self._pending: dict[int, list[Any]] = {}

    def buffers(self, bucket_bytes: int) -> tuple[Tensor, ...]:
        return ()

    def rendezvous(self) -> Rendezvous | None:
        return self._server.info

    def shared(self) -> SharedBuckets | None:
        return None

    def connect(self, channel: WeightChannel, timeout: float) -> None:
        with explained(channel):
            self._group = join_group(self._server.info, 0, timeout)

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        channel.bucket(header, None)
        with explained(channel, header.index), _link(header.index):
            preamble = _preamble(header, payload.device)
            self._pending[header.index] = [
                self._group.broadcast([part], _options()) for part in (preamble, payload)
            ]

    def wait(self, channel: WeightChannel, index: int, timeout: float) -> None:
        # The channel knows of a rank's error first; the group would only time out.
        channel.wait(index, timeout)
        with explained(channel, index), _link(index):
            for work in self._pending.pop(index, ()):
                work.wait()

    def close(self) -> None:
        self._pending.clear()
        held, self._group = [self._group], None
        drop(held)
        self._server.close()


class BroadcastReceiver:
    """Joins as group rank ``rank + 1`` and receives into two alternating buffers."""

    def __init__(self, where: Rendezvous, rank: int, device: str, bucket_bytes: int) -> None:
        self._where, self._rank, self._limit = where, rank, bucket_bytes
        self._device = device if where.backend == "nccl" else "cpu"
        self._group: Any = None
        self._buffers: list[Tensor | None] = [None, None]
        self._closed = threading.Event()

    def connect(self, timeout: float) -> None:
        self._group = join_group(self._where, self._rank + 1, timeout)

    def receive(self, header: BucketHeader, carried: Tensor | None, timeout: float) -> Tensor:
        check_size(header, self._limit)
        into = self._buffer(header)
        wanted = _preamble(header, into.device)
        came = torch.empty_like(wanted)
        try:
            self._wait(self._group.broadcast([came], _options()), header.index, timeout)
            if not torch.equal(came, wanted):
                index, nbytes = came.tolist()
                raise TransferFailed(
                    f"rank {self._rank}: bucket {index} of {nbytes} bytes came where bucket "
                    f"{header.index} of {header.nbytes} was announced"
                )
            self._wait(self._group.broadcast([into], _options()), header.index, timeout)
        except RuntimeError as error:
            raise TransferFailed(
                f"rank {self._rank}: the sender's link broke at bucket {header.index}: {error}"
            ) from error
        return into

    def _buffer(self, header: BucketHeader) -> Tensor:
        which = header.index % 2
        held = self._buffers[which]
        if held is None or held.numel() < header.nbytes:
            held = torch.empty(header.nbytes, dtype=torch.uint8, device=self._device)
            self._buffers[which] = held
        return held[: header.nbytes]

    def _wait(self, work: Any, index: int, timeout: float) -> None:
        # Polled rather than waited for, so that an abort frees this thread at once. NCCL's own
        # deadline would end the process.
        deadline = time.monotonic() + timeout
        while not work.is_completed():
            if self._closed.is_set():
                raise TransferFailed(f"rank {self._rank}: aborted while receiving bucket {index}")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"rank {self._rank}: bucket {index} was announced but did not arrive within "
                    f"{timeout:g} s (phase: transfer)"
                )
            time.sleep(_POLL)
        work.wait()

    def close(self) -> None:
        self._closed.set()
        held, self._group = [self._group], None
        drop(held)


def choose_backend(device: str, cuda_here: bool, shared: bool = False) -> str:
    """NCCL where the engine's ranks (``cuda:0`` ...) and this process have devices, else gloo.

    NCCL refuses a group two of whose members ``shared`` one GPU.
    """
    return "nccl" if device.split(":")[0] == "cuda" and cuda_here and not shared else "gloo"


def shares_gpu(devices: tuple[str, ...]) -> bool:
    """Whether this process's current GPU is among the ranks' UUIDs."""
    if not torch.cuda.is_available():
        return False
    return gpu_uuid(torch.device("cuda", torch.cuda.current_device())) in filter(None, devices)


@contextmanager
def _link(index: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TransferFailed(
            f"the link to the engine's ranks broke at bucket {index}: {error}"
        ) from error


def _preamble(header: BucketHeader, device: torch.device) -> Tensor:
    return torch.tensor([header.index, header.nbytes], dtype=torch.int64, device=device)


def _options() -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.asyncOp = True
    return options
