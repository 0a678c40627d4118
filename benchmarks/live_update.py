"""Seconds of live updates of one engine from tensors in this process's memory.

    python benchmarks/live_update.py CHECKPOINT [--updates 5] [--device cuda]

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
    parser.add_argument("--device", default="cpu", help="of the engine, and where the tensors lie")
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    with Rollout(
        str(args.checkpoint),
        device=args.device,
        weight_layout=args.weight_layout,
        num_threads=args.num_threads,
        skip_tokenizer_init=True,
    ) as engine:
        held = in_memory(args.checkpoint, args.device)
        for _ in range(args.updates):
            start = time.perf_counter()
            receipt = engine.update_weights(held)
            seconds = time.perf_counter() - start
            said = (receipt.details[side] for side in ("digest_seconds", "rank_digest_seconds"))
            digests = sum(map(float, said))
            line = {"seconds": seconds, "without_digests": seconds - digests, **receipt.timings}
            print(json.dumps({key: round(value, 4) for key, value in line.items()}), flush=True)


def in_memory(checkpoint: Path, device: str) -> dict[str, torch.Tensor]:
    """Its tensors, none of them a page of a file."""
    files = sorted(checkpoint.glob("*.safetensors"))
    read = (item for path in files for item in load_file(path).items())
    return {name: tensor.clone().to(device) for name, tensor in read}


if __name__ == "__main__":
    main()
