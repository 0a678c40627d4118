"""deterministic=True: a soak of random schedules, and what it costs.

    python benchmarks/deterministic.py soak [--schedules 1000] [--first 1000] [--dtypes float32]
    python benchmarks/deterministic.py cost CHECKPOINT --dtype bfloat16 [--sequences 8] [--ranks 2]
    python benchmarks/deterministic.py segments CHECKPOINT --dtype bfloat16
    python benchmarks/deterministic.py kernel
    python benchmarks/deterministic.py trainer CHECKPOINT --dtype bfloat16 [--tokens 128]

The soak compares bits of tokens and all logprobs with those of the sequence alone: ``--schedules``
in each dtype, ten on each random engine, whose seeds count up from ``--first``. The cost is the
ratio of seconds, deterministic over default, of batches in turns: medians of ``--rounds``, and the
range of neighbouring batches. ``segments``: the same, in CPU time of one thread, of deterministic
engines on one rank, one of which sums the inputs of row-parallel linears in segments, so that more
ranks give its bits, the other in one run. ``kernel``: the same of such a linear by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rollout import Rollout, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def soak(schedules: int, first: int, dtypes: str) -> None:
    """Ends with an AssertionError that names the first sequence whose bits differ."""
    from determinism.schedules import Ways, alone, compare
    from tiny_models import write_tiny

    for dtype in (getattr(torch, name) for name in dtypes.split(",")):
        with tempfile.TemporaryDirectory() as model:
            write_tiny(model, "qwen3", dtype=dtype)
            wanted, ways, started = alone(model, 64), Ways(), time.perf_counter()
            for seed in range(schedules // 10):
                compare(model, wanted, first + seed, 10, ways)
            print(f"{dtype}: equal bits, {ways}, {time.perf_counter() - started:.0f} s", flush=True)


def cost(args: argparse.Namespace) -> None:
    with engine(args, deterministic=True) as fixed, engine(args) as default:
        seconds = in_turns(args, fixed, default)
    report(args, "deterministic / default", seconds)


def segments(args: argparse.Namespace) -> None:
    place = "rollout.models.layers.linear.segments_of"
    with engine(args, deterministic=True) as cut, contextlib.ExitStack() as other:
        with mock.patch(place, return_value=1):
            whole = other.enter_context(engine(args, deterministic=True))
        seconds = in_turns(args, cut, whole)
    report(args, "in segments / in one run", seconds)


@contextlib.contextmanager
def engine(args: argparse.Namespace, **settings: Any) -> Iterator[Rollout]:
    ranks = getattr(args, "ranks", 1)
    with Rollout(
        args.checkpoint,
        dtype=args.dtype,
        skip_tokenizer_init=True,
        kv_cache_bytes=1 << 28,
        enable_prefix_caching=False,
        num_threads=1 if args.command == "segments" else max(1, 2 // ranks),
        tensor_parallel_size=ranks,
        max_model_len=512,
        **settings,
    ) as rollout:
        yield rollout


def in_turns(args: argparse.Namespace, one: Rollout, other: Rollout) -> list[list[float]]:
    """Seconds of a batch by ``one`` and by ``other``, in every round."""
    prompts = [[(7 * i + 3 * j) % 1000 for j in range(64)] for i in range(args.sequences)]
    params = SamplingParams(temperature=0.0, max_tokens=args.new_tokens, ignore_eos=True)
    # Of an engine in this process CPU time is all of it, and other processes do not count.
    now = time.process_time if args.command == "segments" else time.perf_counter
    seconds: dict[Rollout, list[float]] = {one: [], other: []}
    for turn in range(args.rounds + 1):
        for each in (one, other) if turn % 2 else (other, one):
            started = now()
            each.generate(prompts, params)
            seconds[each].append(now() - started)
    return [a[1:] for a in seconds.values()]  # the first warms up


def report(args: argparse.Namespace, what: str, seconds: list[list[float]]) -> None:
    print(
        f"{args.checkpoint} {args.dtype}, {getattr(args, 'ranks', 1)} ranks, {args.sequences} x 64 "
        f"+ {args.new_tokens}: {what} {compared(*seconds)}"
    )


def compared(one: list[float], other: list[float]) -> str:
    """The ratio of the medians, and the range of those of neighbours."""
    each = [a / b for a, b in zip(one, other, strict=True)]
    ratio = statistics.median(one) / statistics.median(other)
    return f"{ratio:.2f} ({min(each):.2f} to {max(each):.2f})"


def kernel(rounds: int) -> None:
    """One thread's CPU seconds of a row-parallel linear of Llama 1B in four segments, over one."""
    from rollout.kernels import batch_invariant_linear
    from rollout.weights import PLAIN, TileLayout

    torch.set_num_threads(1)
    for dtype, layout in ((torch.bfloat16, TileLayout(16)), (torch.float32, PLAIN)):
        for shape in ((2048, 2048), (2048, 8192)):
            storage = torch.randn(layout.storage_shape(shape)).to(dtype)
            for rows in (1, 8, 256):
                x = torch.randn(rows, shape[1]).to(dtype)
                times = max(1, 64 // rows)
                seconds: dict[int, list[float]] = {4: [], 1: []}
                for turn in range(rounds + 1):
                    for segments in (4, 1) if turn % 2 else (1, 4):
                        started = time.thread_time()
                        for _ in range(times):
                            batch_invariant_linear(x, storage, None, layout, shape, segments)
                        seconds[segments].append(time.thread_time() - started)
                ratio = compared(seconds[4][1:], seconds[1][1:])
                print(f"{dtype} {shape[1]} to {shape[0]}, {rows} rows: 4 segments / 1 {ratio}")


def trainer(args: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM

    from rollout.trainer_ops import patch

    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    plain, own = (AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=dtype) for _ in "ab")
    patch(own)
    rng = torch.Generator().manual_seed(0)
    shape = (args.sequences, args.tokens)
    ids = torch.randint(plain.config.vocab_size, shape, generator=rng)
    for what, learns in (("forward", False), ("forward and backward", True)):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(args.rounds + 1):
            for patched in (True, False) if turn % 2 else (False, True):
                model = own if patched else plain
                model.zero_grad()
                started = time.process_time()
                with torch.set_grad_enabled(learns):
                    logits = model(ids, use_cache=False).logits
                if learns:
                    logits.float().log_softmax(-1)[..., 0].sum().backward()
                seconds[patched].append(time.process_time() - started)
        ratio = compared(seconds[True][1:], seconds[False][1:])
        middle = statistics.median(seconds[False][1:])
        print(f"{args.checkpoint} {args.dtype}, {shape[0]} x {shape[1]} tokens, {what}: ", end="")
        print(f"patched / plain {ratio}; plain {middle:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("soak")
    command.add_argument("--schedules", type=int, default=1000, help="of each dtype")
    command.add_argument("--first", type=int, default=1000, help="seed of the first engine")
    command.add_argument("--dtypes", default="float32,bfloat16")
    for name in ("cost", "segments"):
        command = commands.add_parser(name)
        command.add_argument("checkpoint")
        command.add_argument("--dtype", default="bfloat16")
        command.add_argument("--sequences", type=int, default=8)
        command.add_argument("--new-tokens", type=int, default=32)
        command.add_argument("--rounds", type=int, default=5)
        if name == "cost":
            command.add_argument("--ranks", type=int, default=1)
    command = commands.add_parser("kernel")
    command.add_argument("--rounds", type=int, default=15)
    command = commands.add_parser("trainer")
    command.add_argument("checkpoint")
    command.add_argument("--dtype", default="bfloat16")
    command.add_argument("--sequences", type=int, default=8)
    command.add_argument("--tokens", type=int, default=128)
    command.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.command == "kernel":
        kernel(args.rounds)
    elif args.command == "soak":
        soak(args.schedules, args.first, args.dtypes)
    else:
        {"cost": cost, "segments": segments, "trainer": trainer}[args.command](args)


if __name__ == "__main__":
    main()
