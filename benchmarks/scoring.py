"""Scoring given tokens against plain prefill of the same sequences, in neighbouring rounds.

    python benchmarks/scoring.py [--shape llama1b] [--tokens 4096] [--rounds 5] [--top 0,64]
    python benchmarks/scoring.py --scored all --top 0 --tokens 2048 --rounds 49 --limit 300

Weights are made up, in the sizes of ``make_checkpoint.py``; prefill is ``generate`` of one token.
``all``: every token of the sequences is scored; ``half``: the second half of each, as completions.
The prefix cache is emptied before each run. Each run of scoring has a prefill of its own beside it,
before it and behind it in turns; a ratio is that of such a pair, tokens per second of scoring over
those of prefill. Printed are the medians with their range, and how many tokens were scored in all.
``--limit``: seconds, over all lines, after which no further pair is begun; so the second command
scores 10^5 tokens, or as many of them as fit into 300 s. ``--clock cpu``: by the CPU time of this
process (one rank), for a machine that does other work, too.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable

from make_checkpoint import SHAPES

from rollout import Rollout, SamplingParams

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PREFILL = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-threads", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=4096, help="of a run, in all sequences")
    parser.add_argument("--length", type=int, default=512, help="of a sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scored", choices=("all", "half", "both"), default="both")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of measuring")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--top", default="0,64", help="alternatives of each token, by commas")
    args = parser.parse_args()
    config = SHAPES[args.shape]()
    config.architectures = {"llama": ["LlamaForCausalLM"], "qwen2": ["Qwen2ForCausalLM"]}.get(
        config.model_type, ["Qwen3ForCausalLM"]
    )
    draw = random.Random(0)
    rows = [
        [draw.randrange(3, config.vocab_size) for _ in range(args.length)]
        for _ in range(args.tokens // args.length)
    ]
    half = args.length // 2
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        with Rollout(
            directory, load_format="dummy", dtype=args.dtype, device=args.device,
            num_threads=args.num_threads, max_model_len=args.length + 1, skip_tokenizer_init=True,
            check_finite=False,
        ) as engine:  # fmt: skip
            runs: dict[str, Callable[[], object]] = {}
            prompts, completions = [r[:half] for r in rows], [r[half:] for r in rows]
            for top in map(int, args.top.split(",")):
                runs[f"all, top {top}"] = lambda top=top: engine.score(rows, top_logprobs=top)  # type: ignore[misc]
                runs[f"half, top {top}"] = lambda top=top: engine.score(  # type: ignore[misc]
                    prompts, completions, top_logprobs=top
                )

            def seconds(run: Callable[[], object]) -> float:
                engine.reset_prefix_cache()
                start = CLOCKS[args.clock]()
                run()
                return CLOCKS[args.clock]() - start

            asked = [name for name in runs if args.scored in ("both", name.partition(",")[0])]
            began = time.monotonic()
            for number, name in enumerate(asked, 1):
                until = began + args.limit * number / len(asked)
                report(
                    name, runs[name], lambda: engine.generate(rows, PREFILL), seconds, until, args
                )


def report(
    name: str,
    run: Callable[[], object],
    prefill: Callable[[], object],
    seconds: Callable[[Callable[[], object]], float],
    until: float,
    args: argparse.Namespace,
) -> None:
    """Measure pairs of the two, and print what came. ``until``: of the monotonic clock."""
    pairs: list[tuple[float, float]] = []
    for number in range(args.rounds + 1):
        longest = max(map(sum, pairs), default=0.0)  # by that clock, or less than it
        if number > 1 and time.monotonic() + longest > until:
            break
        first, second = (prefill, run) if number % 2 else (run, prefill)
        pair = (seconds(first), seconds(second))
        pairs.append(pair if number % 2 else pair[::-1])
    pairs = pairs[1:]  # the first warms up
    ratios = sorted(plain / scored for plain, scored in pairs)
    tokens = args.tokens // args.length * args.length
    plain, scored = (tokens / statistics.median(side) for side in zip(*pairs, strict=True))
    print(
        f"{name:14} {scored:8.0f} tokens/s ({args.clock}), prefill {plain:8.0f}: "
        f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), "
        f"{len(pairs) * (tokens // (2 if name.startswith('half') else 1))} tokens scored",
        flush=True,
    )


if __name__ == "__main__":
    main()
