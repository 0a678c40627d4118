"""A decode step of many sequences over many LoRA adapters, against the same step of the base.

    python benchmarks/adapters.py CHECKPOINT [--dtype bfloat16] [--sequences 64] [--adapters 16]
        [--rank 16] [--targets all|attention] [--threads 2] [--steps 24] [--rounds 7]

One engine; in each round, by turns, the sequences decode without adapters and dealt out to all of
them. Prints one JSON line: seconds of a step of both (medians), and the ratio of the same round
with its range. Adapters have random factors, and lie beside every linear of a block, or of
attention alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from rollout import Rollout, SamplingParams

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


def step_seconds(rollout: Rollout, names: list[str | None], steps: int) -> float:
    """Of one decode step, one row for each of ``names``: the mean of ``steps``."""
    prompts = [[3 + (7 * i + j) % 200 for j in range(8)] for i in range(len(names))]
    seconds = []
    for tokens in (1, steps + 1):
        params = [
            SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, adapter=name)
            for name in names
        ]
        started = time.perf_counter()
        rollout.generate(prompts, params)
        seconds.append(time.perf_counter() - started)
    return (seconds[1] - seconds[0]) / steps


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
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    settings = {
        "dtype": args.dtype, "device": args.device, "num_threads": args.threads,
        "skip_tokenizer_init": True, "kv_cache_bytes": 1 << 28, "enable_prefix_caching": False,
        "max_model_len": 256, "max_adapters": args.adapters, "max_lora_rank": args.rank,
    }  # fmt: skip
    base: list[str | None] = [None] * args.sequences
    dealt: list[str | None] = [f"a{i % args.adapters}" for i in range(args.sequences)]
    rows: list[tuple[float, float]] = []
    with Rollout(args.checkpoint, **settings) as rollout, tempfile.TemporaryDirectory() as folder:
        for index in range(args.adapters):
            into = Path(folder) / f"a{index}"
            write_adapter(rollout, into, args.rank, index, args.targets == "attention")
            rollout.load_lora_adapter(into.name, into)
        for turn in range(args.rounds + 1):
            order = (base, dealt) if turn % 2 else (dealt, base)
            found = [step_seconds(rollout, names, args.steps) for names in order]
            if turn:  # the first warms up
                rows.append((found[0], found[1]) if order[0] is base else (found[1], found[0]))
    ratios = [adapted / plain for plain, adapted in rows]
    print(
        json.dumps(
            vars(args)
            | {
                "base_s": median(plain for plain, _ in rows),
                "adapters_s": median(adapted for _, adapted in rows),
                "ratio": [median(ratios), min(ratios), max(ratios)],
            }
        )
    )


if __name__ == "__main__":
    main()
