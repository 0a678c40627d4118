"""A place in a foreign NCCL group that is a torch process group, as SGLang's trainers make it.

NOT YET RUN: it needs two GPUs. The trainer's communicator forms with its first broadcast, so ours
does, too; until then a place is only a store that was reached.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.distributed.native_thread import NativeThread, on_this_stream
from rollout.errors import DeadlineExceeded, TransferFailed
from rollout.weight_sync.transports.foreign_group import ForeignGroup

_POLL = 0.0005
_SLACK = timedelta(hours=1)  # NCCL's own deadline would end the process: ours speaks first


class TorchNcclMember:
    """Rank ``rank`` of ``group`` on ``device``."""

    def __init__(self, group: ForeignGroup, rank: int, device: str) -> None:
        self._group, self._rank, self._device = group, rank, torch.device(device)
        self._place = f"rank {rank} of {group.size} of the group at {group.host}:{group.port}"
        self._backend: Any = None
        self._tcp: Any = None
        self._closed = threading.Event()

    def join(self, timeout: float) -> None:
        group, limit = self._group, timedelta(seconds=timeout)
        try:
            self._tcp = dist.TCPStore(
                group.host, group.port, group.size, is_master=False, timeout=limit
            )
        except (RuntimeError, dist.DistError) as error:
            raise TransferFailed(f"{self._place}: its store was not reached: {error}") from error
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _SLACK
        store = group.store(self._tcp, "cuda")
        self._backend = dist.ProcessGroupNCCL(store, self._rank, group.size, options)

    def receive(self, nbytes: int, timeout: float) -> Tensor:
        if self._closed.is_set():
            raise TransferFailed(f"{self._place}: the group was left")
        into = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        failed: list[RuntimeError] = []

        def run() -> None:
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            try:
                with torch.cuda.device(self._device):
                    self._backend.broadcast([into], options).wait()
                    torch.cuda.current_stream().synchronize()
            except RuntimeError as error:
                failed.append(error)

        # Forming the communicator has no deadline of its own: the thread is left behind at ours.
        # On the stream of this one: steps must not wait for a broadcast.
        thread = NativeThread("rollout-nccl-receive", on_this_stream(run))
        thread.start()
        deadline = time.monotonic() + timeout
        while thread.is_alive():
            if self._closed.is_set():
                raise TransferFailed(f"{self._place}: the group was left")
            if time.monotonic() > deadline:
                self.close()
                raise DeadlineExceeded(
                    f"{self._place}: no broadcast of {nbytes} bytes within {timeout:g} s"
                )
            time.sleep(_POLL)
        if failed:
            raise TransferFailed(f"{self._place}: the link broke in a broadcast: {failed[0]}")
        return into

    def is_alive(self) -> bool:
        try:
            return not self._closed.is_set() and self._tcp.check(["any"]) is not None
        except (RuntimeError, dist.DistError):
            return False

    def close(self) -> None:
        """Abort what is under way, from any thread. Idempotent."""
        self._closed.set()
        backend, self._backend = self._backend, None
        if backend is not None:
            held = [backend]
            del backend
            NativeThread("drop-group", lambda: held.pop().abort()).start()
