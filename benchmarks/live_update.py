"""Seconds of live updates of one engine from tensors in this process's memory.

    python benchmarks/live_update.py CHECKPOINT [--updates 5] [--weight-layout tiles]

A JSON line for each update: the whole call, the same without the digests of sender and rank (which
wait for one another where tensors are large), and the receipt's parts. `peer_vllm_update.py` is the
same for vLLM.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from rollout import Rollout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--weight-layout", default="auto")
    parser.add_argument("--num-threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    with Rollout(
        str(args.checkpoint),
        weight_layout=args.weight_layout,
        num_threads=args.num_threads,
        skip_tokenizer_init=True,
    ) as engine:
        held = in_memory(args.checkpoint)
        for _ in range(args.updates):
            start = time.perf_counter()
            receipt = engine.update_weights(held.items())
            seconds = time.perf_counter() - start
            said = (receipt.details[side] for side in ("digest_seconds", "rank_digest_seconds"))
            digests = sum(map(float, said))
            line = {"seconds": seconds, "without_digests": seconds - digests, **receipt.timings}
            print(json.dumps({key: round(value, 4) for key, value in line.items()}), flush=True)


def in_memory(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Its tensors, none of them a page of a file."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return {name: tensor.clone() for path in files for name, tensor in load_file(path).items()}


if __name__ == "__main__":
    main()
