"""What an update of a trainer on the engine's GPU costs the host, whatever the bytes take.

    python benchmarks/host_work_update.py --layers 32
    python benchmarks/host_work_update.py --layers 32 --another-process
    python benchmarks/host_work_update.py --layers 32 --beside ANOTHER_CHECKOUT --rounds 5

A Llama of so small matrices that copies and digests take no time is read where it lies, as from a
GPU: what is left is done for each tensor and each step of the protocol. Prints milliseconds of
processor time of all threads, and of wall clock, of an update after the first ones: the least of
all, as other work of the machine only adds to it. The trainer is in the engine's process, or, with
`--another-process`, connected to a service that maps each tensor's memory by `ipc`: files stand for
what CUDA maps. With `--beside` both checkouts take turns in processes of their own, and the ratios
of their medians over the rounds are printed, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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


def take_cpu_for_a_gpu() -> None:
    """A CPU's tensors are read where they lie, and digested in few calls; files are mapped as the
    memory of a GPU is.
    """
    from pretended_cuda.on_cpu import replacements

    for owner, name, value in replacements():
        setattr(owner, name, value)


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
        command = [sys.executable, "-W", "ignore", __file__, "--serve", folder]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        ) as service:
            said: Any = service.stdout
            address = next(line.split()[1] for line in said if line.startswith("serving "))

            def of_the_engine() -> float:
                print(file=service.stdin, flush=True)
                return float(said.readline())

            clocks = {"trainer": time.process_time, "engine": of_the_engine}
            with Rollout.connect(address) as engine:
                found = timed(engine, model, updates, clocks)
            assert service.stdin is not None
            service.stdin.close()
            return found


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
    parser.add_argument("--serve", metavar="CKPT", help=argparse.SUPPRESS)
    beside.add_flags(parser, rounds=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.serve:
        serve(args.serve)
        return
    words = ["--layers", str(args.layers), "--updates", str(args.updates)]
    words += ["--another-process"] * args.another_process
    measured = measure_another if args.another_process else measure
    beside.run(args, lambda: measured(args.layers, args.updates), words)


if __name__ == "__main__":
    main()
