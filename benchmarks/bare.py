"""The least that could work, to measure `sync.py` against: bare gathers and bare transfers.

    python benchmarks/bare.py TRANSPORT RENDEZVOUS RANK BYTES BUCKET_BYTES

is a receiver, which `sync.py` starts. As many bytes as an update has, from one process to
`RECEIVERS[TRANSPORT]` others, without headers, digests, layouts or checks. Sender and receivers
call the same function; rank 0 sends.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RECEIVERS = {"broadcast": 2, "ipc": 2, "grpc_stream": 1, "disk": 1}
WAIT = 120  # seconds


def gather(model: Any) -> float:
    """Seconds of ``full_tensor`` one by one and nothing else; collective over the trainer."""
    dist.barrier()
    started = time.perf_counter()
    for parameter in model.parameters():
        parameter.full_tensor()
    return time.perf_counter() - started


def move(transport: str, rendezvous: str, rank: int, nbytes: int, bucket_bytes: int) -> float:
    """Seconds from the moment that all are ready until every receiver has every byte."""
    group = dist.ProcessGroupGloo(
        dist.FileStore(rendezvous, RECEIVERS[transport] + 1),
        rank,
        RECEIVERS[transport] + 1,
        timedelta(seconds=WAIT),
    )
    return TRANSPORTS[transport](group, rendezvous, rank, nbytes, bucket_bytes)


def broadcast(group: Any, rendezvous: str, rank: int, nbytes: int, bucket_bytes: int) -> float:
    """Raw gloo, every byte to every receiver."""
    bucket = torch.ones(bucket_bytes, dtype=torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    for _ in range(2):  # the first one connects
        group.broadcast([bucket], options).wait()
    started = time.perf_counter()
    for at in range(0, nbytes, bucket_bytes):
        group.broadcast([bucket[: min(bucket_bytes, nbytes - at)]], options).wait()
    group.barrier().wait()
    return time.perf_counter() - started


def ipc(group: Any, rendezvous: str, rank: int, nbytes: int, bucket_bytes: int) -> float:
    """Copies into and out of two halves of shared memory; each receiver takes its part of each."""
    receivers, page = RECEIVERS["ipc"], mmap.PAGESIZE
    path = f"/dev/shm/rollout-bare-{Path(rendezvous).stem}-{os.stat(rendezvous).st_ino}"
    if rank == 0:
        Path(path).touch()
        os.truncate(path, page + 2 * bucket_bytes)
    group.barrier().wait()
    with open(path, "r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    counts, halves = memory[:page].view(torch.int64), memory[page:].view(2, bucket_bytes)
    own = torch.ones(bucket_bytes if rank == 0 else -(-bucket_bytes // receivers)).to(torch.uint8)
    group.barrier().wait()
    if rank == 0:
        os.unlink(path)
    started = time.perf_counter()
    for turn, at in enumerate(range(0, nbytes, bucket_bytes)):
        size = min(bucket_bytes, nbytes - at)
        if rank == 0:
            _until(lambda turn=turn: int(counts[1 : receivers + 1].min()) >= turn - 1)
            halves[turn % 2, :size].copy_(own[:size])
        else:
            _until(lambda turn=turn: int(counts[0]) > turn)
            part = halves[turn % 2, :size].chunk(receivers)[rank - 1]
            own[: part.numel()].copy_(part)
        counts[rank] = turn + 1
    group.barrier().wait()
    return time.perf_counter() - started


def _until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not met():
        if time.monotonic() > deadline:
            sys.exit("the other side of the shared memory does not move")
        time.sleep(1e-4)


def grpc_stream(group: Any, rendezvous: str, rank: int, nbytes: int, bucket_bytes: int) -> float:
    """Messages of raw bytes on one stream over loopback, copied into one buffer at the end."""
    import grpc

    options = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
    size = min(bucket_bytes, 1 << 20)
    port = torch.zeros(1, dtype=torch.int64)
    choice = dist.BroadcastOptions()
    choice.rootRank, choice.rootTensor = 1, 0
    server = None
    if rank == 1:
        buffer = memoryview(bytearray(size))

        def take(messages: Any, context: Any) -> bytes:
            count = 0
            for message in messages:
                buffer[: len(message)] = message
                count += len(message)
            return struct.pack("<q", count)

        handler = grpc.method_handlers_generic_handler(
            "Bare", {"Take": grpc.stream_unary_rpc_method_handler(take)}
        )
        server = grpc.server(ThreadPoolExecutor(2), [handler], options=options)
        port[0] = server.add_insecure_port("127.0.0.1:0")
        server.start()
    group.broadcast([port], choice).wait()
    seconds = 0.0
    if rank == 0:
        source = memoryview(bytearray(size))
        with grpc.insecure_channel(f"127.0.0.1:{int(port)}", options=options) as channel:
            call = channel.stream_unary("/Bare/Take")
            call(iter([b"0"]), timeout=WAIT)  # connects
            started = time.perf_counter()
            parts = (bytes(source[: min(size, nbytes - at)]) for at in range(0, nbytes, size))
            assert struct.unpack("<q", call(parts, timeout=WAIT))[0] == nbytes
            seconds = time.perf_counter() - started
    group.barrier().wait()
    if server is not None:
        server.stop(None)
    return seconds


def disk(group: Any, rendezvous: str, rank: int, nbytes: int, bucket_bytes: int) -> float:
    """One file, written from the beginning to the end, then read so."""
    path = f"{rendezvous}.file"
    bucket = memoryview(bytearray(bucket_bytes))
    group.barrier().wait()
    started = time.perf_counter()
    if rank == 0:
        with open(path, "wb", buffering=0) as file:
            for at in range(0, nbytes, bucket_bytes):
                file.write(bucket[: min(bucket_bytes, nbytes - at)])
    group.barrier().wait()
    if rank == 1:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(bucket):
                pass
    group.barrier().wait()
    seconds = time.perf_counter() - started
    if rank == 0:
        os.unlink(path)
    return seconds


TRANSPORTS: dict[str, Callable[..., float]] = {
    "broadcast": broadcast,
    "ipc": ipc,
    "grpc_stream": grpc_stream,
    "disk": disk,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    move(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
