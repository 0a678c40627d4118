"""A decode step of many sequences over many LoRA adapters, against the same step of the base.

    python benchmarks/adapters.py CHECKPOINT [--dtype bfloat16] [--sequences 64] [--adapters 16]
        [--rank 16] [--targets all|attention] [--threads 2] [--rounds 60]

One engine, whose ranks take decode steps by turns: of sequences without adapters, and of the same
dealt out to all of them. Prints one JSON line: the medians of both in seconds, and of the ratios of
neighbouring steps the median and quartiles, by the clock and by the time on its CPUs, which others
on the machine change less. Adapters have random factors, and lie beside every
linear of a block, or of attention alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from stepping import BLOCK, Decoding

from rollout import Rollout

CONTEXT = 100  # tokens of each sequence
WARM_UPS = 3
Seconds = tuple[float, float]  # of a step: by the clock, on this process's CPUs
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_adapter(rollout: Rollout, into: Path, rank: int, seed: int, attention: bool) -> None:
    """As PEFT saves it."""
    made = torch.Generator().manual_seed(seed)
    factors = {}
    for meta in rollout.weight_info().tensors:
        module = meta.name.removesuffix(".weight")
        leaf = module.rsplit(".", 1)[-1]
        if not leaf.endswith("_proj") or (attention and leaf not in ATTENTION):
            continue
        outputs, inputs = meta.shape
        stem = f"base_model.model.{module}"
        factors[f"{stem}.lora_A.weight"] = torch.randn(rank, inputs, generator=made) / inputs**0.5
        factors[f"{stem}.lora_B.weight"] = torch.randn(outputs, rank, generator=made) * 0.01
    into.mkdir()
    save_file(factors, into / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (into / "adapter_config.json").write_text(json.dumps(config))


def decoding(core: Any, count: int, adapters: int) -> Decoding:
    """Rows that take single steps, each with one of ``adapters`` (0: the base alone)."""
    made = Decoding(core, core.num_kv_blocks * BLOCK, count, CONTEXT)
    for index, entry in enumerate(made.entries):
        if adapters:
            entry.sequence.adapter = core.adapters.newest(f"a{index % adapters}")
    return made


def one_step(rows: Decoding) -> Seconds:
    started = time.process_time()
    seconds = rows.turn(1)
    return seconds, time.process_time() - started


def ratio(pairs: list[tuple[float, float]]) -> list[float]:
    """Median and quartiles."""
    found = sorted(adapted / base for base, adapted in pairs)
    quarter = len(found) // 4
    return [median(found), found[quarter], found[-1 - quarter]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=("all", "attention"), default="all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    settings = {
        "dtype": args.dtype, "device": args.device, "num_threads": args.threads,
        "skip_tokenizer_init": True, "kv_cache_bytes": 1 << 28, "block_size": BLOCK,
        "max_model_len": 256, "max_adapters": args.adapters, "max_lora_rank": args.rank,
    }  # fmt: skip
    rows: list[tuple[Seconds, Seconds]] = []
    with Rollout(args.checkpoint, **settings) as rollout, tempfile.TemporaryDirectory() as folder:
        for index in range(args.adapters):
            into = Path(folder) / f"a{index}"
            write_adapter(rollout, into, args.rank, index, args.targets == "attention")
            rollout.load_lora_adapter(into.name, into)
        core = rollout._async.backend.core
        plain, dealt = (decoding(core, args.sequences, count) for count in (0, args.adapters))
        for _ in range(args.rounds + WARM_UPS):
            rows.append((one_step(plain), one_step(dealt)))
    rows = rows[WARM_UPS:]
    by_clock = ratio([(base[0], adapted[0]) for base, adapted in rows])
    on_cpu = ratio([(base[1], adapted[1]) for base, adapted in rows])
    print(
        json.dumps(
            vars(args)
            | {
                "base_s": median(base[0] for base, _ in rows),
                "adapters_s": median(adapted[0] for _, adapted in rows),
                "ratio": by_clock,
                "ratio_on_cpu": on_cpu,
            }
        )
    )


if __name__ == "__main__":
    main()
