"""The parts of a live weight update: FSDP2 over 2 trainer ranks -> a TP=2 service.

    python benchmarks/sync.py CHECKPOINT [--updates 5] [--bucket-mib 64] [--dtype bfloat16]
        [--transport broadcast,ipc,grpc_stream,disk,p2p] [--source fsdp2|plain] [--bare]
        [--json FILE] [--picture FILE]

Starts `rollout serve` and the trainer ranks as processes of their own and prints a JSON line for
each transport: medians over the updates (the first, which builds the engine's shadow, is reported
apart) of gather, transfer, stage, verify, commit, stall and total in seconds, and of digesting on
the sender and on the slowest rank, with the share of both in the total; bytes; and the peak memory
of each process above what it held before the first update, in bytes. Transports take turns. For
"disk" the trainer writes a version, which the service then reads; writing counts as transfer.

`--bare` follows each update with the least that could work (bare.py): `full_tensor()` one by one,
and the same bytes over a bare transfer (before either side of "disk" a file as long is written and
deleted, see `page_cache`); `of_bare` is the median, least and most of update / bare of
the same round, and `of_broadcast` that of total / `broadcast`'s of the same round. `--source plain`
is one trainer process that holds the whole model, so that nothing is gathered. `--picture` draws
where the time goes, from this run or, without a checkpoint, from the lines of `--json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bare import RECEIVERS
from trainer_group import TRAINERS, sharded_checkpoint, trainer_group

PARTS = ("gather", "transfer", "stage", "verify", "commit", "stall", "total")
SIDES = ("sender", "rank")


def main() -> None:
    args = parse_arguments()
    if args.rank is not None:
        trainer(args)
        return
    if args.checkpoint is None:
        lines = [json.loads(line) for line in args.json.read_text().splitlines()]
    else:
        with tempfile.TemporaryDirectory() as scratch:
            args.scratch = scratch
            with service(args, scratch) as (process, address):
                args.address = address
                lines = measure(args, process)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        print(text, end="", flush=True)
        if args.json is not None:
            args.json.write_text(text)
    if args.picture is not None:
        draw(lines, args.picture)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", help="of trainer and engine")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--source", choices=("fsdp2", "plain"), default="fsdp2")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.checkpoint is None and (args.json is None or args.picture is None):
        parser.error("give a checkpoint, or --json and --picture")
    return args


# ---- the parent: starts, watches, reports ----


def measure(args: argparse.Namespace, engine: subprocess.Popen[str]) -> list[dict[str, Any]]:
    transports = args.transport.split(",")
    rounds: list[dict[str, dict[str, Any]]] = []
    with contextlib.ExitStack() as stack:
        command = [sys.executable, __file__, args.checkpoint, "--updates", str(args.updates)]
        command += ["--bucket-mib", str(args.bucket_mib), "--dtype", args.dtype]
        command += ["--transport", args.transport, "--source", args.source]
        command += ["--address", args.address, "--scratch", args.scratch]
        command += ["--bare"] if args.bare else []
        count = 1 if args.source == "plain" else TRAINERS
        ranks = [stack.enter_context(child([*command, "--rank", str(r)])) for r in range(count)]
        expect(ranks, "loaded")
        watch = Watch([p.pid for p in ranks], children(engine.pid))
        with watch:
            for process in ranks:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            for turn in range(args.updates + 1):
                rounds.append({})
                for transport in transports:
                    rounds[turn][transport] = expect(ranks, "receipt")
                    if args.bare and turn and transport in RECEIVERS:
                        rounds[turn][transport]["bare"] = _bare(ranks, args.bucket_mib << 20)
    peaks = {
        "trainer_peak_extra_bytes": watch.extra(0),
        "engine_peak_extra_bytes": watch.extra(1),
    }
    return [_line(args, transport, rounds) | peaks for transport in transports]


def _line(
    args: argparse.Namespace, transport: str, rounds: list[dict[str, dict[str, Any]]]
) -> dict[str, Any]:
    first, *rest = (found[transport] for found in rounds)
    totals = [r["timings"]["total"] for r in rest]
    line = {
        "checkpoint": Path(args.checkpoint).name,
        "dtype": args.dtype,
        "trainers": TRAINERS if args.source == "fsdp2" else 1,
        "tensor_parallel_size": 2,
        "updates": args.updates,
        "transport": transport if transport == "disk" else first["transport"],
        "bytes": first["bytes"],
        "wire_bytes": first["wire_bytes"],
        "bucket_bytes": args.bucket_mib << 20,
        "largest_tensor_bytes": first["largest"],
        **{f"{part}_s": median(r["timings"][part] for r in rest) for part in PARTS},
        **{f"{side}_digest_s": median(r["digests"][side] for r in rest) for side in SIDES},
        "digest_share": median(sum(r["digests"].values()) / r["timings"]["total"] for r in rest),
        "totals_s": [round(total, 4) for total in totals],
        "first_total_s": first["timings"]["total"],
    }
    if "broadcast" in rounds[0]:
        others = [found["broadcast"]["timings"]["total"] for found in rounds[1:]]
        line["of_broadcast"] = spread([a / b for a, b in zip(totals, others, strict=True)])
    if "bare" in rest[0]:
        sums = [sum(r["bare"].values()) for r in rest]
        line["of_bare"] = spread([a / b for a, b in zip(totals, sums, strict=True)])
        line |= {
            f"bare_{part}_s": median(r["bare"][part] for r in rest) for part in rest[0]["bare"]
        }
    return line


def spread(ratios: Sequence[float]) -> list[float]:
    """Median, least and most."""
    return [round(ratio, 3) for ratio in (median(ratios), min(ratios), max(ratios))]


def _bare(ranks: list[subprocess.Popen[str]], bucket_bytes: int) -> dict[str, float]:
    """Start the receivers of a bare transfer; what the first trainer rank measured."""
    start = expect(ranks, "bare")
    script = str(Path(__file__).with_name("bare.py"))
    with contextlib.ExitStack() as stack:
        for rank in range(1, RECEIVERS[start["transport"]] + 1):
            where = [start["transport"], start["rendezvous"], str(rank), str(start["bytes"])]
            stack.enter_context(child([sys.executable, script, *where, str(bucket_bytes)]))
        found = expect(ranks, "bared")
    return {"gather": found["gather"], "transfer": found["seconds"]}


def expect(ranks: list[subprocess.Popen[str]], event: str) -> dict[str, Any]:
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
def service(
    args: argparse.Namespace, weight_dir: str | None = None, *, tensor_parallel_size: int = 2
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "rollout", "serve", args.checkpoint, "--port", "0"]
    command += ["--grpc-port", "0", "--dtype", args.dtype]
    command += ["--tensor-parallel-size", str(tensor_parallel_size)]
    command += ["--exit-with-stdin", "--skip-tokenizer-init", "--num-threads", "1"]
    command += ["--kv-cache-bytes", str(256 << 20), "--max-model-len", "512"]
    command += ["--weight-dir", weight_dir] if weight_dir is not None else []
    with serving(command) as found:
        yield found


@contextlib.contextmanager
def serving(command: list[str], **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves, and the address of its gRPC port."""
    with child(command, **env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("ready "):
            sys.exit("the rollout service did not start")
        yield process, line.split("grpc=")[1].strip()


@contextlib.contextmanager
def child(command: list[str], **env: str) -> Iterator[subprocess.Popen[str]]:
    interface = "lo" if sys.platform == "linux" else "lo0"
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": interface}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **quiet, **env},
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Stacked bars of the parts, and a mark at the whole: parts that run beside others pass it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2))
    names, left = [line["transport"] for line in lines], [0.0] * len(lines)
    for part in ("gather", "transfer", "stage", "verify", "commit"):
        seconds = [line[f"{part}_s"] for line in lines]
        axes.barh(names, seconds, left=left, label=part)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    totals = [line["total_s"] for line in lines]
    axes.scatter(totals, names, marker="|", s=300, color="black", label="the whole update")
    axes.set_xlabel(f"seconds, {lines[0]['bytes'] / 1e9:.2f} GB, medians of {lines[0]['updates']}")
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# ---- a trainer rank ----


def trainer(args: argparse.Namespace) -> None:
    if args.source == "plain":
        update_repeatedly(args)
        return
    with trainer_group(f"{args.scratch}/rendezvous", args.rank):
        update_repeatedly(args)


def update_repeatedly(args: argparse.Namespace) -> None:
    """Load, shard, wait for "go", and update; every update sends other values."""
    import torch
    from transformers import AutoModelForCausalLM

    from rollout import Rollout

    if args.source == "plain":
        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(
            args.checkpoint, dtype=getattr(torch, args.dtype)
        )
    else:
        model = sharded_checkpoint(args.checkpoint, args.dtype)
    with Rollout.connect(args.address, timeout=120.0) as engine:
        largest = max(meta.nbytes for meta in engine.weight_info().tensors)
        negate(model)  # shards that still are pages of the file become memory before it is measured
        barrier()
        _tell(event="loaded")
        sys.stdin.readline()
        for turn in range(args.updates + 1):
            for transport in args.transport.split(","):
                negate(model)
                if args.wait and turn:
                    sys.stdin.readline()
                started = time.perf_counter()
                receipt, writing = update(args, engine, model, transport, turn)
                if args.rank == 0:
                    timings = dict(receipt.timings)
                    timings["transfer"] += writing
                    timings["total"] += writing
                    _tell(
                        event="receipt",
                        seconds=time.perf_counter() - started,
                        timings=timings,
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
                if args.bare and turn and transport in RECEIVERS:
                    least(args, model, transport, turn, engine.weight_info().tensors)


def update(
    args: argparse.Namespace, engine: Any, model: Any, transport: str, turn: int
) -> tuple[Any, float]:
    """The receipt ("disk": the first rank's), and the seconds that writing a version took."""
    import torch

    from rollout.weight_sync.versions.reader import folder
    from rollout.weight_sync.versions.store import LocalStore
    from rollout.weight_sync.versions.writer import VersionWriter

    size = args.bucket_mib << 20
    if transport != "disk":
        options = {"transport": transport, "bucket_bytes": size, "timeout": 300.0}
        return engine.update_weights(model, **options), 0.0
    where = Path(args.scratch) / "versions"
    if args.rank == 0:
        page_cache(args, engine.weight_info().tensors)
    barrier()
    started, receipt = time.perf_counter(), None
    writer = VersionWriter(LocalStore(where), dtype=getattr(torch, args.dtype), bucket_bytes=size)
    writer.write(model, turn, timeout=300.0)
    writing = time.perf_counter() - started
    if args.rank == 0:
        written = where / folder(turn)
        receipt = engine.update_weights(server_path=written, timeout=300.0)
        shutil.rmtree(written)
    barrier()
    return receipt, writing


def least(args: argparse.Namespace, model: Any, transport: str, turn: int, tensors: Any) -> None:
    """Gather and move as many bytes with nothing else."""
    import bare

    gathered = bare.gather(model) if args.source == "fsdp2" else 0.0
    if args.rank == 0:
        rendezvous, nbytes = (
            f"{args.scratch}/{transport}.{turn}",
            sum(meta.nbytes for meta in tensors),
        )
        if transport == "disk":
            page_cache(args, tensors)
        _tell(event="bare", transport=transport, rendezvous=rendezvous, bytes=nbytes)
        seconds = bare.move(transport, rendezvous, 0, nbytes, args.bucket_mib << 20)
        _tell(event="bared", gather=gathered, seconds=seconds)


def page_cache(args: argparse.Namespace, tensors: Any) -> None:
    """Write as much as an update will and delete it: a virtual machine has pages for it then.

    Pages that it has to ask its host for cost several times what writing them does, and would be
    paid by whichever side comes first.
    """
    path, bucket = Path(args.scratch) / "pages", bytes(args.bucket_mib << 20)
    with path.open("wb", buffering=0) as file:
        for _ in range(0, sum(meta.nbytes for meta in tensors), len(bucket)):
            file.write(bucket)
    path.unlink()


def barrier() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def negate(model: Any) -> None:
    """Other values in the same memory, on this rank's shards."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            getattr(parameter, "to_local", lambda p=parameter: p)().mul_(-1)


def _tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
