"""This engine on the workloads; the peer runners' arguments and JSON lines.

    python benchmarks/generate.py CHECKPOINT W1,B8 [--seed N] [--tensor-parallel-size N]

No prompt is seen twice, but the second call of a workload would find its prompts in the prefix
cache; the cache is emptied before each call.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runner import Generate, parser, run
from workloads import Request

from rollout import Rollout, SamplingParams


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--device", default="auto")
    arguments.add_argument("--tensor-parallel-size", type=int, default=1)
    arguments.add_argument("--pipeline-parallel-size", type=int, default=1)
    arguments.add_argument("--num-threads", type=int, default=None)
    arguments.add_argument("--weight-layout", default="auto")
    arguments.add_argument("--executor", default="auto")
    arguments.add_argument("--async-scheduling", action="store_true")
    arguments.add_argument("--kv-cache-gib", type=float, default=2.0, help="as peer_vllm.py")
    arguments.add_argument("--kv-cache-dtype", default="auto")
    arguments.add_argument("--quantization", default="auto")
    arguments.add_argument("--cuda-graphs", default="auto")
    arguments.add_argument("--max-num-seqs", type=int, default=256)
    args = arguments.parse_args()
    run("rollout", args, lambda: started(args))


@contextmanager
def started(args: Namespace) -> Iterator[Generate]:
    with Rollout(
        args.checkpoint,
        dtype=args.dtype,
        device=args.device,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        num_threads=args.num_threads,
        weight_layout=args.weight_layout,
        executor=args.executor,
        async_scheduling=args.async_scheduling or None,  # the device's default
        max_num_seqs=args.max_num_seqs,
        kv_cache_dtype=args.kv_cache_dtype,
        quantization=args.quantization,
        cuda_graphs=args.cuda_graphs,
        kv_cache_bytes=int(args.kv_cache_gib * 2**30),
        skip_tokenizer_init=True,
    ) as engine:
        yield lambda batch, new_tokens: generate(engine, batch, new_tokens)


def generate(engine: Rollout, batch: Sequence[Request], new_tokens: int | None = None) -> float:
    """Seconds of one greedy call, with as many tokens as each request wants or ``new_tokens``.

    Greedy samples of one prompt are equal, so each is a request of its own; the prefix cache
    shares their prompt.
    """
    engine.reset_prefix_cache()
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
