"""transformers' `generate` on the workloads, as a static batch.

    python benchmarks/peer_transformers.py CHECKPOINT W1,B8 [--seed N] [--dtype bfloat16]

Ragged workloads are left-padded to their longest prompt and run to their longest answer, which is
what a user of `generate` pays; only the tokens that were asked for are counted.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from workloads import Request, figures, parse_names, requests


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("workloads", type=parse_names)
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-threads", type=int, default=None)
    args = parser.parse_args()
    seed = int(time.time()) if args.seed is None else args.seed
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=dtype).eval()
    generate(model, requests("W1", 0), 4)  # warm-up
    for name in args.workloads:
        batch = requests(name, seed)
        first = generate(model, batch, 1)
        seconds = generate(model, batch, max(r.new_tokens for r in batch))
        line = figures("transformers", args.checkpoint, name, batch, seconds, first)
        print(json.dumps(line), flush=True)


@torch.inference_mode()
def generate(model: PreTrainedModel, batch: Sequence[Request], new_tokens: int) -> float:
    """Seconds to write ``new_tokens`` greedy tokens after every prompt of ``batch``."""
    width = max(len(r.prompt) for r in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
        mask[row, width - len(request.prompt) :] = 1
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
