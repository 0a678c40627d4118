"""This engine on the workloads; the peer runners' arguments and JSON lines.

    python benchmarks/generate.py CHECKPOINT W1,B8 [--seed N] [--tensor-parallel-size N]

`first_token_s` is a whole call that asks for one token per sample, as in the other runners. No
prompt is seen twice, but the second call of a workload would find its prompts in the prefix cache;
the cache is emptied between the two.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

from workloads import Request, figures, parse_names, requests

from rollout import Rollout, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("workloads", type=parse_names)
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--num-threads", type=int, default=None)
    args = parser.parse_args()
    seed = int(time.time()) if args.seed is None else args.seed
    with Rollout(
        args.checkpoint,
        dtype=args.dtype,
        device=args.device,
        tensor_parallel_size=args.tensor_parallel_size,
        num_threads=args.num_threads,
        skip_tokenizer_init=True,
    ) as engine:
        generate(engine, requests("W1", 0), 4)  # warm-up
        for name in args.workloads:
            batch = requests(name, seed)
            first = generate(engine, batch, 1)
            engine.reset_prefix_cache()
            seconds = generate(engine, batch)
            line = figures("rollout", args.checkpoint, name, batch, seconds, first)
            print(json.dumps(line), flush=True)


def generate(engine: Rollout, batch: Sequence[Request], new_tokens: int | None = None) -> float:
    """Seconds of one greedy call, with as many tokens as each request wants or ``new_tokens``.

    Greedy samples of one prompt are equal, so each is a request of its own; the prefix cache
    shares their prompt.
    """
    params = [
        SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=new_tokens or request.new_tokens,
            detokenize=False,
        )
        for request in batch
    ]
    start = time.perf_counter()
    outputs = engine.generate([request.prompt for request in batch], params)
    seconds = time.perf_counter() - start
    for output, asked in zip(outputs, params, strict=True):
        made = len(output.outputs[0].token_ids)
        assert made == asked.max_tokens, f"{made} tokens instead of {asked.max_tokens}"
    return seconds


if __name__ == "__main__":
    main()
