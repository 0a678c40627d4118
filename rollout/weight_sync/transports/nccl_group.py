"""An NCCL group of the sender (rank 0) and the engine's ranks, for the buckets of one update.

NOT YET RUN on two GPUs; the pretended card runs it on gloo. Before each payload goes a preamble of
fixed size, (index, nbytes): a message longer than its receive is undefined.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollout.distributed import Rendezvous, join_group
from rollout.distributed.native_thread import NativeThread
from rollout.errors import DeadlineExceeded, TransferFailed

_POLL = 0.0005  # seconds between looks at a pending receive


class NcclGroup:
    """One member. ``close`` is for any thread, everything else for one at a time."""

    def __init__(self, where: Rendezvous, rank: int) -> None:
        self._where, self._rank = where, rank
        self._group: Any = None
        self._pending: dict[int, list[Any]] = {}
        self._closed = threading.Event()

    def connect(self, timeout: float) -> None:
        self._group = join_group(self._where, self._rank, timeout)
        if self._closed.is_set():  # meanwhile, when there was nothing to abort yet
            self.close()

    def send(self, index: int, payload: Tensor) -> None:
        with self._link(index) as group:
            parts = (_preamble(index, payload), payload)
            self._pending[index] = [group.broadcast([part], _options()) for part in parts]

    def wait(self, index: int, timeout: float) -> None:
        with self._link(index):
            for work in self._pending.pop(index, ()):
                work.wait()

    def receive(self, index: int, into: Tensor, timeout: float) -> None:
        wanted = _preamble(index, into)
        came = torch.empty_like(wanted)
        with self._link(index) as group:
            self._wait(group.broadcast([came], _options()), index, timeout)
            if not torch.equal(came, wanted):
                other, nbytes = came.tolist()
                raise TransferFailed(
                    f"rank {self._rank}: bucket {other} of {nbytes} bytes came where bucket "
                    f"{index} of {into.numel()} was announced"
                )
            self._wait(group.broadcast([into], _options()), index, timeout)

    def close(self) -> None:
        """Abort what is under way: NCCL leaves a kernel waiting for a peer that is gone."""
        self._closed.set()
        self._pending.clear()
        group, self._group = self._group, None
        if group is not None:
            held = [group]

            def end() -> None:
                held.pop().abort()

            del group
            NativeThread("drop-group", end).start()

    @contextmanager
    def _link(self, index: int) -> Iterator[Any]:
        """The group, whose errors become ``TransferFailed``."""
        group = self._group
        if group is None or self._closed.is_set():
            raise TransferFailed(f"rank {self._rank}: aborted before bucket {index}")
        try:
            yield group
        except RuntimeError as error:
            raise TransferFailed(
                f"rank {self._rank}: the group's link broke at bucket {index}: {error}"
            ) from error

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


def _preamble(index: int, payload: Tensor) -> Tensor:
    return torch.tensor([index, payload.numel()], dtype=torch.int64, device=payload.device)


def _options() -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.asyncOp = True
    return options
