"""An update of one LoRA adapter, by the trainer's clock and in its parts.

    python benchmarks/adapter_update.py CHECKPOINT [--rank 16] [--targets all|attention]
        [--updates 20] [--threads 2] [--remote ipc|grpc_stream|broadcast]

One engine in this process, and a PEFT model beside it whose factors change before each update; with
``--remote`` the updates go to the engine's port, as another process's would. Prints one JSON line:
bytes, seconds of the calls (median, least, most; the first, which warms up, apart), and the medians
of the receipts' timings.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from rollout import Rollout

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def adapted(checkpoint: str, rank: int, targets: list[str]) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    return get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))


def train(model: PeftModel, seed: int) -> None:
    """Every factor changes."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.02, generator=made)


def measure(rollout: Rollout, model: PeftModel, updates: int, **options: Any) -> dict[str, Any]:
    calls, receipts = [], []
    for step in range(updates + 1):
        train(model, step)
        started = time.perf_counter()
        receipts.append(rollout.update_weights(adapters={"policy": model}, **options))
        calls.append(time.perf_counter() - started)
    first, *calls = calls
    parts = receipts[-1].timings
    return {
        "transport": receipts[-1].transport,
        "tensors": receipts[-1].num_tensors,
        "bytes": receipts[-1].num_bytes,
        "wire_bytes": receipts[-1].wire_bytes,
        "first": round(first, 4),
        "seconds": [round(f(calls), 4) for f in (median, min, max)],
        "timings": {
            part: round(median(r.timings[part] for r in receipts[1:]), 5) for part in parts
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=("all", "attention"), default="all")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--remote", default="", metavar="TRANSPORT")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    targets = ALL if args.targets == "all" else ATTENTION
    model = adapted(args.checkpoint, args.rank, targets)
    with ExitStack() as stack:
        rollout = stack.enter_context(
            Rollout(
                args.checkpoint, device="cpu", num_threads=args.threads, num_kv_blocks=64,
                max_adapters=3, max_lora_rank=args.rank,
            )
        )  # fmt: skip
        options = {}
        if args.remote:
            rollout = stack.enter_context(Rollout.connect(rollout.address))
            options = {"transport": args.remote}
        print(json.dumps(vars(args) | measure(rollout, model, args.updates, **options)))


if __name__ == "__main__":
    main()
