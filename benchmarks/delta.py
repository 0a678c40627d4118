"""Full updates and deltas in turns: FSDP2 over 2 trainer ranks -> a TP=2 service.

    python benchmarks/delta.py CHECKPOINT [--changed 0.01] [--rounds 5] [--transport grpc_stream]

Each round sends new values four times: in full without keeping anything, in full as an anchor that
every rank keeps its part of, and twice as a delta against what came before, in which each element
has changed with the probability ``--changed``. The first is compared with either delta: their
seconds from the call of ``update_weights`` to its return on rank 0, and their bytes. Prints one
JSON line: for the delta after the anchor and for the one after a delta, the median ratio and its
range over the rounds; medians of each side's parts, and the bytes. The first round, which builds
the engine's shadow, is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from sync import PARTS, child, service
from trainer_group import TRAINERS, sharded_checkpoint, trainer_group

KINDS = ("full", "anchor", "delta", "next")  # two deltas in a row


def main() -> None:
    args = parse_arguments()
    if args.rank is not None:
        trainer(args)
        return
    with tempfile.TemporaryDirectory() as scratch, service(args) as (_, address):
        print(json.dumps(measure(args, address, str(Path(scratch) / "rendezvous"))), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--changed", type=float, default=0.01, help="fraction of elements")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", help="of trainer and engine")
    parser.add_argument("--transport", default="grpc_stream")
    parser.add_argument("--encoding", default="delta", help="delta or delta-zstd")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(args: argparse.Namespace, address: str, rendezvous: str) -> dict[str, Any]:
    """Start the ranks and sum up what rank 0 says of each update."""
    command = [
        sys.executable,
        __file__,
        *sys.argv[1:],
        "--address",
        address,
        "--rendezvous",
        rendezvous,
    ]
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(child([*command, "--rank", str(r)])) for r in range(TRAINERS)]
        said: list[dict[str, Any]] = [json.loads(line) for line in lines(ranks[0])]
        if any(process.wait() for process in ranks):
            sys.exit("a trainer rank failed")
    rounds = [said[i : i + len(KINDS)] for i in range(len(KINDS), len(said), len(KINDS))]
    full, delta, following = ([row[i] for row in rounds] for i in (0, 2, 3))
    return {
        "checkpoint": args.checkpoint,
        "transport": delta[0]["transport"],
        "encodings": [full[0]["encoding"], delta[0]["encoding"]],
        "rounds": len(rounds),
        "bytes": full[0]["bytes"],
        "full_wire_bytes": full[0]["wire_bytes"],
        "delta_wire_bytes": [row["wire_bytes"] for row in delta],
        "changed": [row["elements"] for row in delta],
        "after_anchor": ratio(full, delta),
        "after_delta": ratio(full, following),
        "full_s": parts(full),
        "delta_s": parts(delta),
        "next_s": parts(following),
    }


def ratio(full: list[dict[str, Any]], delta: list[dict[str, Any]]) -> list[float]:
    """Of the rounds' seconds: median, least and most."""
    found = [d["seconds"] / f["seconds"] for f, d in zip(full, delta, strict=True)]
    return [median(found), min(found), max(found)]


def lines(process: subprocess.Popen[str]) -> list[str]:
    """What rank 0 says of each update, shown as it comes."""
    assert process.stdout is not None
    found = []
    for line in process.stdout:
        if line.startswith("{"):
            found.append(line)
            print(line, end="", file=sys.stderr, flush=True)
    return found


def parts(rows: list[dict[str, Any]]) -> dict[str, float]:
    found = {part: median(row["timings"][part] for row in rows) for part in PARTS}
    return {**found, "call": median(row["seconds"] for row in rows)}


# ---- a trainer rank ----


def trainer(args: argparse.Namespace) -> None:
    with trainer_group(args.rendezvous, args.rank):
        update_in_turns(args)


def update_in_turns(args: argparse.Namespace) -> None:
    import torch.distributed as dist

    from rollout import Rollout

    model = sharded_checkpoint(args.checkpoint, args.dtype)
    connect = {"timeout": 120.0}
    with (
        Rollout.connect(args.address, **connect) as plain,
        Rollout.connect(args.address, **connect) as keeping,
    ):
        for number in range(args.rounds + 1):
            for kind in KINDS:
                part = args.changed if kind in ("delta", "next") else 1.0
                change(model, part, len(KINDS) * number + KINDS.index(kind))
                dist.barrier()
                engine = plain if kind == "full" else keeping
                started = time.perf_counter()
                receipt = engine.update_weights(
                    model,
                    transport=args.transport,
                    encoding="full" if kind == "full" else args.encoding,
                    bucket_bytes=args.bucket_mib << 20,
                    timeout=120.0,
                )
                seconds = time.perf_counter() - started
                if args.rank == 0:
                    tell(receipt, seconds)


def change(model: Any, fraction: float, seed: int) -> None:
    """Another sign for this fraction of the elements of this rank's shards, drawn at random."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            shard = parameter.to_local().view(-1)
            if fraction == 1.0:
                shard.mul_(-1)
                continue
            count = int(len(shard) * fraction)
            where = torch.randint(0, max(1, len(shard)), (count,), generator=generator)
            shard[where.unique()] *= -1


def tell(receipt: Any, seconds: float) -> None:
    row = {
        "seconds": seconds,
        "timings": dict(receipt.timings),
        "bytes": receipt.num_bytes,
        "wire_bytes": receipt.wire_bytes,
        "transport": receipt.transport,
        "encoding": receipt.details["encoding"],
        "elements": int(receipt.details.get("sent_elements", 0)),
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
