"""The parts of a live weight update: FSDP2 over 2 trainer ranks -> a TP=2 service.

    python benchmarks/sync.py CHECKPOINT [--updates 5] [--bucket-mib 64] [--dtype bfloat16]
                                         [--transport broadcast,p2p,...] [--bare]

Starts `rollout serve` and the trainer ranks as processes of their own and prints one JSON line:
medians over the updates (the first, which builds the engine's shadow, is reported apart) of gather,
transfer, stage, verify, commit, stall and total in seconds, and of digesting on the sender and on
the slowest rank, with the share of both in the total; bytes; and the peak memory of each process
above what it held before the first update, in bytes. Several transports take turns,
and each has its own line. `--bare` alternates with the least that could work: `full_tensor()` one
by one, and the same bytes over a raw gloo broadcast.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

TRAINERS = 2
PARTS = ("gather", "transfer", "stage", "verify", "commit", "stall", "total")
SIDES = ("sender", "rank")


def main() -> None:
    args = parse_arguments()
    if args.rank is not None:
        trainer(args)
        return
    with tempfile.TemporaryDirectory() as scratch, service(args) as (process, address):
        meeting = str(Path(scratch) / "meeting")
        for line in measure(args, process, address, meeting):
            print(json.dumps(line), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", help="of trainer and engine")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- the parent: starts, watches, reports ----


def measure(
    args: argparse.Namespace, engine: subprocess.Popen[str], address: str, meeting: str
) -> list[dict[str, Any]]:
    names = args.transport.split(",")
    with contextlib.ExitStack() as stack:
        command = [sys.executable, __file__, args.checkpoint, "--updates", str(args.updates)]
        command += ["--bucket-mib", str(args.bucket_mib), "--dtype", args.dtype]
        command += ["--transport", args.transport, "--address", address, "--meeting", meeting]
        command += ["--bare"] if args.bare else []
        ranks = [stack.enter_context(child([*command, "--rank", str(r)])) for r in range(TRAINERS)]
        assert ranks[0].stdin is not None
        _expect(ranks, "loaded")
        watch = Watch([p.pid for p in ranks], children(engine.pid))
        with watch:
            for process in ranks:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            receipts, bare = [], []
            for turn in range(args.updates + 1):
                receipts += [_expect(ranks, "receipt") for _ in names]
                if args.bare and turn:
                    start = _expect(ranks, "bare")
                    bare.append(_bare(ranks, start, args.bucket_mib << 20))
    least = {f"bare_{part}_s": median(b[part] for b in bare) for part in (bare or [{}])[0]}
    extra = {
        "trainer_peak_extra_bytes": watch.extra(0),
        "engine_peak_extra_bytes": watch.extra(1),
        **least,
    }
    lines = [_line(args, receipts[i :: len(names)]) for i in range(len(names))]
    return [{**line, **extra} for line in lines]


def _line(args: argparse.Namespace, receipts: list[dict[str, Any]]) -> dict[str, Any]:
    first, rest = receipts[0], receipts[1:]
    return {
        "checkpoint": args.checkpoint,
        "dtype": args.dtype,
        "trainers": TRAINERS,
        "tensor_parallel_size": 2,
        "updates": args.updates,
        "transport": first["transport"],
        "bytes": first["bytes"],
        "wire_bytes": first["wire_bytes"],
        "bucket_bytes": args.bucket_mib << 20,
        "largest_tensor_bytes": first["largest"],
        **{f"{part}_s": median(r["timings"][part] for r in rest) for part in PARTS},
        **{f"{side}_digest_s": median(r["digests"][side] for r in rest) for side in SIDES},
        "digest_share": median(sum(r["digests"].values()) / r["timings"]["total"] for r in rest),
        "totals_s": [round(r["timings"]["total"], 4) for r in rest],
        "first_total_s": first["timings"]["total"],
    }


def _bare(
    ranks: list[subprocess.Popen[str]], start: dict[str, Any], bucket_bytes: int
) -> dict[str, float]:
    """Start the receivers of a bare broadcast; what the first trainer rank measured."""
    script = str(Path(__file__).with_name("bare.py"))
    with contextlib.ExitStack() as stack:
        for rank in (1, 2):
            where = [start["meeting"], str(rank), str(start["bytes"]), str(bucket_bytes)]
            stack.enter_context(child([sys.executable, script, *where]))
        found = _expect(ranks, "bared")
    return {"gather": found["gather"], "broadcast": found["broadcast"]}


def _expect(ranks: list[subprocess.Popen[str]], event: str) -> dict[str, Any]:
    """The next event of that kind from rank 0 ("loaded": from every rank)."""
    found: dict[str, Any] = {}
    for process in ranks if event == "loaded" else ranks[:1]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{") and (found := json.loads(line))["event"] == event:
                break
        else:
            sys.exit(f"a trainer rank ended before {event!r}")
    return found


class Watch:
    """Samples the anonymous memory of two groups of processes while the block runs."""

    def __init__(self, *groups: list[int]) -> None:
        self._groups = groups
        self._before = [[memory(pid) for pid in group] for group in groups]
        self._peak = [list(before) for before in self._before]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def extra(self, group: int) -> list[int]:
        return [p - b for p, b in zip(self._peak[group], self._before[group], strict=True)]

    def _sample(self) -> None:
        while not self._end.wait(0.002):
            for group, pids in enumerate(self._groups):
                for index, pid in enumerate(pids):
                    self._peak[group][index] = max(self._peak[group][index], memory(pid))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()


def memory(pid: int) -> int:
    """Resident bytes without file pages, which the system may drop; 0 for a process that ended."""
    try:
        text = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(text[1]) - int(text[2])) * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    found = [int(part) for part in text.split()]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        extra = (thread / "children").read_text().split()
        found += [int(part) for part in extra if int(part) not in found]
    return sorted(found)


@contextlib.contextmanager
def service(args: argparse.Namespace) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "rollout", "serve", args.checkpoint, "--port", "0"]
    command += ["--grpc-port", "0", "--tensor-parallel-size", "2", "--dtype", args.dtype]
    command += ["--exit-with-stdin", "--skip-tokenizer-init", "--num-threads", "1"]
    command += ["--kv-cache-bytes", str(256 << 20), "--max-model-len", "512"]
    with child(command) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("ready "):
            sys.exit("the rollout service did not start")
        yield process, line.split("grpc=")[1].strip()


@contextlib.contextmanager
def child(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    interface = "lo" if sys.platform == "linux" else "lo0"
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": interface}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **quiet},
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


# ---- a trainer rank ----


def trainer(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{args.meeting}",
        rank=args.rank,
        world_size=TRAINERS,
        timeout=timedelta(seconds=120),
    )
    try:
        update_repeatedly(args)
    finally:
        dist.destroy_process_group()


def update_repeatedly(args: argparse.Namespace) -> None:
    """Load, shard, wait for "go", and update; every update sends other values."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from rollout import Rollout

    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=dtype)
    mesh = init_device_mesh("cpu", (TRAINERS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with Rollout.connect(args.address, timeout=120.0) as engine:
        largest = max(meta.nbytes for meta in engine.weight_info().tensors)
        negate(model)  # shards that still are pages of the file become memory before it is measured
        dist.barrier()
        _tell(event="loaded")
        sys.stdin.readline()
        for turn in range(args.updates + 1):
            for transport in args.transport.split(","):
                negate(model)
                receipt = engine.update_weights(
                    model,
                    transport=transport,
                    bucket_bytes=args.bucket_mib << 20,
                    timeout=300.0,
                )
                if args.rank == 0:
                    _tell(
                        event="receipt",
                        timings=dict(receipt.timings),
                        digests={
                            "sender": float(receipt.details["digest_seconds"]),
                            "rank": float(receipt.details["rank_digest_seconds"]),
                        },
                        bytes=receipt.num_bytes,
                        wire_bytes=receipt.wire_bytes,
                        transport=receipt.transport,
                        largest=largest,
                    )
                time.sleep(0.2)
            if args.bare and turn:
                least(args, model, f"{args.meeting}.{turn}", receipt.num_bytes)


def least(args: argparse.Namespace, model: Any, meeting: str, nbytes: int) -> None:
    """Gather and broadcast with nothing else."""
    import bare

    gathered = bare.gather(model)
    if args.rank == 0:
        _tell(event="bare", meeting=meeting, bytes=nbytes)
        sent = bare.broadcast(meeting, 0, nbytes, args.bucket_mib << 20)
        _tell(event="bared", gather=gathered, broadcast=sent)


def negate(model: Any) -> None:
    """Other values in the same memory, on this rank's shards."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(-1)


def _tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
