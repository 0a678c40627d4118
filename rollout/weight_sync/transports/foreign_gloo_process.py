"""The process that holds a place in a foreign gloo group; see ``foreign_gloo``.

The rank's end of the socket is its life line: when that closes, it ends at once.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from rollout.distributed import gloo_group
from rollout.errors import DeadlineExceeded, RolloutError, TransferFailed, to_wire
from rollout.weight_sync.transports.foreign_group import ForeignGroup
from rollout.wire.frames import recv_frame, send_frame

_FOREVER = timedelta(days=1)  # the rank keeps the time, and ends this process


def main() -> None:
    sock, memory = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(1)
    asked: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_read, args=(sock, asked), daemon=True).start()
    send_frame(sock, {"ok": True})
    try:
        store, group = _join(asked.get())
        send_frame(sock, {"ok": True})
        while True:
            if nbytes := asked.get()["nbytes"]:
                _receive(group, memory, nbytes)
            else:
                _look(store)
            send_frame(sock, {"ok": True})
    except RolloutError as error:
        send_frame(sock, {"error": to_wire(error)})


def _read(sock: socket.socket, asked: SimpleQueue[dict[str, Any]]) -> None:
    try:
        while (frame := recv_frame(sock)) is not None:
            asked.put(frame[0])
    except (RolloutError, OSError):
        pass
    os._exit(0)


def _join(ask: dict[str, Any]) -> tuple[Any, Any]:
    """The trainer's store, which counts its members as they come, and the group over it."""
    group, rank = ForeignGroup(**ask["group"]), ask["rank"]
    limit = timedelta(seconds=ask["timeout"])
    place = f"rank {rank} of {group.size} at {group.host}:{group.port}"
    try:
        store = dist.TCPStore(group.host, group.port, group.size, is_master=False, timeout=limit)
        ours = group.store(store, "cpu")
        return store, gloo_group(ours, group.host, rank, group.size, limit)
    except (RuntimeError, dist.DistError, OSError) as error:
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        kind = DeadlineExceeded if late else TransferFailed
        told = str(error).splitlines()[0]
        raise kind(
            f"{place}: the group did not form within {ask['timeout']:g} s; does the trainer "
            f"listen there, and do all {group.size} members come? ({told})"
        ) from error


def _look(store: Any) -> None:
    try:
        store.check(["rollout"])
    except (RuntimeError, dist.DistError) as error:
        raise TransferFailed(
            f"the trainer's store is gone: {str(error).splitlines()[0]}"
        ) from error


def _receive(group: Any, memory: int, nbytes: int) -> None:
    mapped = mmap.mmap(memory, nbytes)
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    options.timeout = _FOREVER
    try:
        group.broadcast([torch.frombuffer(mapped, dtype=torch.uint8)], options).wait(_FOREVER)
    except RuntimeError as error:
        told = str(error).splitlines()[0]
        raise TransferFailed(f"the trainer's link broke in a broadcast: {told}") from error


if __name__ == "__main__":
    main()
