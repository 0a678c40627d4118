"""What ranks and processes share: NCCL's groups, and memory by its handles."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretended_cuda.card import Card, all_tensors, plain_of
from pretended_cuda.segments import name_of_segment, segment_at
from pretended_cuda.timeline import record, touches
from rollout.errors import TransferFailed
from rollout.weight_sync.transports.cuda_memory import Allocation


class Nccl:
    """A group of the card's tensors: gloo's, on what they hold. Graphs capture what it does."""

    class Options:
        _timeout = timedelta(seconds=30)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        group: Any = dist.ProcessGroupGloo
        self._group = group(store, rank, size, options._timeout)

    def eager_connect_single_device(self, device: Any) -> None:
        """gloo's members have met when the group is made."""

    def __getattr__(self, name: str) -> Any:
        called = getattr(self._group, name)
        if name not in ("allreduce", "allgather", "broadcast"):
            return called

        def call(tensors: Any, *rest: Any) -> Any:
            def run() -> None:
                called(*plain).wait()
                touches(name, [], all_tensors(plain))

            assert all(isinstance(x, Card) for x in all_tensors((tensors, rest))), name
            plain = plain_of((tensors, *rest))
            run()
            record(run, None)
            return Done()

        return call


class Done:
    """Work of a group that is behind us."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Runtime:
    """The calls of libcudart that share memory, by files in place of a device's memory."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[mmap.mmap, Path | None]] = {}
        self._own: set[str] = set()  # names of what was allocated here
        self._threads: set[int] = set()  # that have a context, as the driver wants it

    def enter(self) -> None:
        self._threads.add(threading.get_ident())

    def allocate(self, nbytes: int) -> int:
        if nbytes > 1 << 40:
            raise TransferFailed("cudaMalloc failed: out of memory (2)")
        descriptor, name = tempfile.mkstemp(prefix="card-")
        os.truncate(descriptor, nbytes)
        os.close(descriptor)
        return self._map(Path(name), own=True)

    def handle(self, pointer: int) -> bytes:
        if (name := name_of_segment(pointer)) is not None:
            return name.encode().ljust(64, b"\0")
        path = self._held[pointer][1]
        assert path is not None
        return path.name.encode().ljust(64, b"\0")

    def open(self, handle: bytes) -> int:
        name = handle.rstrip(b"\0").decode()
        if name in self._own or name.startswith(f"/proc/{os.getpid()}/"):
            raise TransferFailed("cudaIpcOpenMemHandle failed: invalid device context (201)")
        try:
            return self._map(Path(tempfile.gettempdir(), name), own=False)
        except OSError as error:
            raise TransferFailed(f"cudaIpcOpenMemHandle failed: {error}") from error

    def around(self, pointer: int) -> Allocation:
        assert threading.get_ident() in self._threads, "the driver is asked without a context"
        if (begun := self._held.get(pointer)) is not None:
            return Allocation(pointer, len(begun[0]), False)
        for start, (memory, _) in [*self._held.items()]:  # other threads map and free
            if start <= pointer < start + len(memory):
                return Allocation(start, len(memory), False)
        found = segment_at(pointer)
        return Allocation(pointer, 1 << 62, False) if found is None else found

    def set_byte(self, pointer: int, value: int, stream: int) -> None:
        self.enter()
        ctypes.memset(pointer, value, 1)

    def close(self, pointer: int) -> None:
        del self._held[pointer]

    def free(self, pointer: int) -> None:
        _, path = self._held.pop(pointer)
        assert path is not None
        self._own.remove(path.name)
        path.unlink()

    def _map(self, path: Path, *, own: bool) -> int:
        self.enter()
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        pointer = ctypes.addressof(ctypes.c_uint8.from_buffer(memory))
        self._held[pointer] = memory, path if own else None
        if own:
            self._own.add(path.name)
        return pointer
