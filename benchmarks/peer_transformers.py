"""transformers' `generate` on the workloads, as a static batch.

    python benchmarks/peer_transformers.py CHECKPOINT W1,B8 [--seed N] [--dtype bfloat16]

Ragged workloads are left-padded to their longest prompt and run to their longest answer, which is
what a user of `generate` pays; only the tokens that were asked for are counted.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from runner import Generate, parser, run
from transformers import AutoModelForCausalLM, PreTrainedModel
from workloads import Request


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--num-threads", type=int, default=None)
    args = arguments.parse_args()
    run("transformers", args, lambda: started(args))


@contextmanager
def started(args: Namespace) -> Iterator[Generate]:
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=dtype).eval()
    yield lambda batch, new_tokens: generate(model, batch, new_tokens)


@torch.inference_mode()
def generate(
    model: PreTrainedModel, batch: Sequence[Request], new_tokens: int | None = None
) -> float:
    """Seconds to write ``new_tokens``, or as many as the longest wants, after every prompt."""
    count = new_tokens or max(r.new_tokens for r in batch)
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
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
