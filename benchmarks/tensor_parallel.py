"""Tensor parallel on one CPU box: collectives through shared memory beside those through sockets.

    python benchmarks/tensor_parallel.py reduce [--ranks 2] [--rounds 7]
    python benchmarks/tensor_parallel.py step CHECKPOINT [--batch 1,8,32] [--context 64]
                                              [--rounds 7] [--steps 16] [--single | --single-only]

``reduce``: one bfloat16 all-reduce of 1 KiB to 8 MiB in two rank processes. ``step``: decode steps
of whole executors. Both sides live at once and take turns; a line gives each side's median over
the rounds, in microseconds, and the median of the ratios of neighbours (over 1: shared memory is
faster). ``--single`` adds one rank with two threads, ``--single-only`` puts it in place of sockets.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
from stepping import BLOCK, Decoding, running

from rollout.distributed import Rendezvous, RendezvousServer, join_group
from rollout.engine.worker.shared_memory_group import SharedMemoryGroup, create_shared, share_memory
from rollout.wire.codec import from_plain, to_plain

SIZES = [1 << k for k in range(10, 24)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    reduce = commands.add_parser("reduce")
    reduce.add_argument("--ranks", type=int, default=2)
    reduce.add_argument("--rounds", type=int, default=7)
    reduce.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)  # fd, rank, rendezvous
    step = commands.add_parser("step")
    step.add_argument("checkpoint")
    step.add_argument("--batch", type=_numbers, default=[1, 8, 32])
    step.add_argument("--context", type=int, default=64)
    step.add_argument("--rounds", type=int, default=7)
    step.add_argument("--steps", type=int, default=16, help="of one turn")
    step.add_argument("--single", action="store_true")
    step.add_argument("--single-only", action="store_true")
    step.add_argument("--weight-layout", default="auto")
    args = parser.parse_args()
    if args.command == "step":
        measure_steps(args)
    elif args.rank is None:
        run_ranks(args.ranks, args.rounds)
    else:
        measure_reductions(args.ranks, args.rounds, *args.rank)


def run_ranks(size: int, rounds: int) -> None:
    """Start the rank processes of ``reduce``; rank 0 prints."""
    fd = create_shared(size)
    if fd is None:
        raise SystemExit("this machine has no anonymous shared memory")
    server = RendezvousServer(size, "gloo")
    where = json.dumps(to_plain(server.info))
    command = [sys.executable, __file__, "reduce", "--ranks", str(size), "--rounds", str(rounds)]
    ranks = [
        subprocess.Popen([*command, "--rank", str(fd), str(rank), where], pass_fds=(fd,))
        for rank in range(size)
    ]
    os.close(fd)
    failed = [rank.args for rank in ranks if rank.wait()]
    server.close()
    if failed:
        raise SystemExit(f"{len(failed)} ranks failed")


def measure_reductions(size: int, rounds: int, fd: str, rank: str, where: str) -> None:
    """One rank's part: both groups by turns, the same number of times on every rank."""
    torch.set_num_threads(1)
    sockets = join_group(from_plain(Rendezvous, json.loads(where)), int(rank), 60.0)
    memory = share_memory(sockets, int(fd), int(rank), size, 60.0)
    if memory is sockets:
        raise SystemExit("the ranks share no memory here: is there a C compiler?")
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 2, dtype=torch.bfloat16)
        repeats = max(8, min(400, (4 << 20) // nbytes))

        def turn(group, tensor=tensor, repeats=repeats) -> float:
            group.allreduce([tensor]).wait()  # so that all ranks begin together
            started = time.perf_counter()
            for _ in range(repeats):
                group.allreduce([tensor]).wait()
            return (time.perf_counter() - started) / repeats

        turn(memory), turn(sockets)
        pairs = [(turn(memory), turn(sockets)) for _ in range(rounds)]
        if rank == "0":
            print(f"{nbytes / 1024:8g} KiB  {_line(pairs)}", flush=True)
    measure_gathers(memory, rounds, rank == "0")


def measure_gathers(memory: SharedMemoryGroup, rounds: int, shown: bool) -> None:
    """Logits of a 151936-word vocabulary: rows joined as they arrive, beside parts joined after."""
    for rows in (1, 8, 32):
        part = torch.ones(rows, 75968, dtype=torch.bfloat16)

        def joined(part=part) -> torch.Tensor:
            return memory.gather_last(part)

        def apart(part=part, rows=rows) -> torch.Tensor:
            return torch.cat(memory.gather_last(part.view(-1)).view(-1, rows, 75968).unbind(), -1)

        assert torch.equal(joined(), apart())
        pairs = [
            tuple(_mean(run, 64 // rows + 4) for run in (joined, apart)) for _ in range(rounds)
        ]
        if shown:
            print(f"gather {rows:2} rows  {_line(pairs, 'then joined')}", flush=True)


def _mean(run: Callable[[], object], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats


def measure_steps(args: argparse.Namespace) -> None:
    """Decode steps at every batch size; all executors are up all the time, one works."""
    pool = max(args.batch) * (args.context // BLOCK + 1) * BLOCK
    names = {"memory": (2, True), "sockets": (2, False), "single": (1, False)}
    rivals = ["single"] if args.single_only else ["sockets", *(["single"] if args.single else [])]
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(
                running(args.checkpoint, ranks, pool, shared=shared, layout=args.weight_layout)
            )
            for name, (ranks, shared) in names.items()
            if name in ("memory", *rivals)
        }
        for batch in args.batch:
            turns = {n: Decoding(side, pool, batch, args.context) for n, side in sides.items()}
            for turn in turns.values():
                turn.turn(2)
            rounds = [{n: t.turn(args.steps) for n, t in turns.items()} for _ in range(args.rounds)]
            for rival in rivals:
                other = "one rank, 2 threads" if rival == "single" else rival
                pairs = [(r["memory"], r[rival]) for r in rounds]
                print(f"batch {batch:4}  {_line(pairs, other)}", flush=True)


def _line(pairs: Sequence[tuple[float, float]], other: str = "sockets") -> str:
    mine, theirs = (statistics.median(side) * 1e6 for side in zip(*pairs, strict=True))
    ratios = sorted(b / a for a, b in pairs)
    return (
        f"memory {mine:10.1f} us  {other} {theirs:10.1f} us  "
        f"ratio {statistics.median(ratios):6.2f} ({ratios[0]:.2f} .. {ratios[-1]:.2f})"
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
