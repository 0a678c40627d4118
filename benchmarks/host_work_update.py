"""What an update of a trainer on the engine's GPU costs the host, whatever the bytes take.

    python benchmarks/host_work_update.py --layers 32
    python benchmarks/host_work_update.py --layers 32 --another-process
    python benchmarks/host_work_update.py --layers 32 --ranks 2
    python benchmarks/host_work_update.py --layers 32 --beside ANOTHER_CHECKOUT --rounds 5

A Llama of so small matrices that copies and digests take no time is read where it lies, as from a
GPU: what is left is done for each tensor and each step of the protocol. Prints milliseconds of
processor time of all threads, and of wall clock, of an update after the first ones: the least of
all, as other work of the machine only adds to it. The trainer is in the engine's process, or, with
`--another-process`, connected to a service that maps each tensor's memory by `ipc`: files stand for
what CUDA maps. With `--ranks` it is so many processes over which FSDP2 has sharded the model, and
updates go in turns by `ipc`, which maps what each of them holds, by `reshard`, with gloo in the
place of NCCL, and by `p2p`. With `--beside` both
checkouts take turns in processes of their own, and the ratios of their medians over the rounds are
printed, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import beside
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollout import Rollout

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu" / "pretended"))

SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "device": "cpu",
    "weight_layout": "plain",
    "num_threads": 1,
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "kv_cache_bytes": 1 << 22,
    "max_num_seqs": 4,
}


def take_cpu_for_a_gpu(rank: int = 0) -> None:
    """A CPU's tensors are read where they lie, and digested in few calls; files are mapped as the
    memory of a GPU is.
    """
    from pretended_cuda.on_cpu import UUIDS, exchanging, replacements, worker

    for owner, name, value in (*replacements(), *exchanging(lambda: rank)):
        setattr(owner, name, value)
    worker.reached_gpus = lambda device: UUIDS


def make_model(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


def measure(layers: int, updates: int) -> dict[str, float]:
    """Milliseconds of an update from the engine's own process, and how many tensors it has."""
    take_cpu_for_a_gpu()
    model = make_model(layers)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with Rollout(folder, **SETTINGS) as engine:
            return timed(engine, model, updates, {"processor": time.process_time})


def measure_another(layers: int, updates: int) -> dict[str, float]:
    """As ``measure``, of a trainer that is connected to a service, which maps its tensors."""
    from pretended_cuda.segments import in_segment

    take_cpu_for_a_gpu()
    model = make_model(layers)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for parameter in model.parameters():
            parameter.data = in_segment(parameter.data)
        with service(folder) as (address, of_the_engine), Rollout.connect(address) as engine:
            clocks = {"trainer": time.process_time, "engine": of_the_engine}
            return timed(engine, model, updates, clocks)


def measure_ranks(layers: int, updates: int, ranks: int) -> dict[str, float]:
    """As ``measure_another``, of a trainer of several ranks; the first one's processor time."""
    take_cpu_for_a_gpu()
    with tempfile.TemporaryDirectory() as folder:
        make_model(layers).save_pretrained(folder)
        words = ["--layers", str(layers), "--updates", str(updates), "--ranks", str(ranks)]
        command = [sys.executable, "-W", "ignore", __file__, *words, "--folder", folder]
        with service(folder) as (address, of_the_engine), ExitStack() as stack:
            for rank in range(1, ranks):
                rest = ["--rank", str(rank), "--address", address]
                other = subprocess.Popen([*command, *rest], stdout=subprocess.DEVNULL)
                stack.enter_context(other)
                stack.callback(other.kill)
            return as_rank(0, address, Path(folder), layers, updates, ranks, of_the_engine)


def as_rank(
    rank: int, address: str, folder: Path, layers: int, updates: int, ranks: int,
    of_the_engine: Callable[[], float] = lambda: 0.0,
) -> dict[str, float]:  # fmt: skip
    """One rank's part of all updates, by the transports in turns."""
    import torch.distributed as dist
    from pretended_cuda.segments import in_segment
    from torch.distributed.fsdp import fully_shard

    meet = f"file://{folder / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    model: Any = fully_shard(make_model(layers))
    for parameter in model.parameters():
        parameter._local_tensor.data = in_segment(parameter._local_tensor.data)
    rows: dict[str, list[list[float]]] = {"ipc": [], "reshard": [], "p2p": []}
    with Rollout.connect(address) as engine:
        for number in range(updates + 3):
            for transport, kept in rows.items():
                dist.barrier()
                before, engines = time.process_time(), of_the_engine()
                started = time.perf_counter()
                receipt = engine.update_weights(model, encoding="full", transport=transport)
                passed = time.perf_counter() - started
                spent = time.process_time() - before, of_the_engine() - engines
                if receipt.transport != transport:
                    raise SystemExit(f"it went by {receipt.transport}: {receipt.details}")
                if number >= 3:
                    kept.append([*spent, passed])
    dist.destroy_process_group()
    found: dict[str, float] = {}
    names = ("first rank", "engine", "wall clock")
    for transport, kept in rows.items():
        for what, values in zip(names, zip(*kept, strict=True), strict=True):
            found[f"{transport}: {what}"] = min(values) * 1e3
    return {**found, "tensors": float(receipt.num_tensors)}


@contextmanager
def service(folder: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """The address of an engine in a process of its own, and the processor time that it has had."""
    command = [sys.executable, "-W", "ignore", __file__, "--serve", folder]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        said: Any = process.stdout

        def spent() -> float:
            print(file=process.stdin, flush=True)
            return float(said.readline())

        try:
            yield next(line.split()[1] for line in said if line.startswith("serving ")), spent
        finally:
            assert process.stdin is not None
            process.stdin.close()


def timed(
    engine: Rollout, model: LlamaForCausalLM, updates: int, clocks: dict[str, Callable[[], float]]
) -> dict[str, float]:
    """The least of each of ``clocks``, in milliseconds, and of wall clock."""
    rows = []
    for number in range(updates + 3):
        before = [clock() for clock in clocks.values()]
        started = time.perf_counter()
        receipt = engine.update_weights(model, encoding="full")
        passed = time.perf_counter() - started
        spent = [clock() - then for clock, then in zip(clocks.values(), before, strict=True)]
        if number >= 3:
            rows.append([*spent, passed])
    if receipt.details.get("read_in_place") != f"{receipt.num_tensors} tensors":
        raise SystemExit(f"not every tensor was read where it lies: {receipt.details}")
    least = [min(row) * 1e3 for row in zip(*rows, strict=True)]
    names = [*clocks, "wall clock"]
    return {**dict(zip(names, least, strict=True)), "tensors": float(receipt.num_tensors)}


def serve(folder: str) -> None:
    """A service that tells its processor time as often as it is asked for it."""
    take_cpu_for_a_gpu()
    with Rollout(folder, **SETTINGS) as engine:
        print("serving", engine.serve(), flush=True)
        for _ in sys.stdin:
            print(time.process_time(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--another-process", action="store_true")
    parser.add_argument("--ranks", type=int, default=0, help="of a trainer under FSDP2")
    for hidden in ("--serve", "--folder", "--address"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    beside.add_flags(parser, rounds=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.serve:
        serve(args.serve)
        return
    size = args.layers, args.updates
    if args.rank:
        take_cpu_for_a_gpu(args.rank)
        as_rank(args.rank, args.address, Path(args.folder), *size, args.ranks)
        return
    words = ["--layers", str(args.layers), "--updates", str(args.updates)]
    words += ["--another-process"] * args.another_process
    words += ["--ranks", str(args.ranks)] if args.ranks else []
    measured = measure_another if args.another_process else measure
    if args.ranks:
        beside.run(args, lambda: measure_ranks(*size, args.ranks), words)
    else:
        beside.run(args, lambda: measured(*size), words)


if __name__ == "__main__":
    main()
