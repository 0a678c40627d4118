"""Tokens per second with drafts by prompt lookup, as a share of those without.

    python benchmarks/speculative.py CHECKPOINT --sequences 1 8 16 32 --rounds 5

How much drafts bring depends on the text, which made-up weights do not have. So there are three
texts, between which any other lies:

- right: the second answer to prompts, the same as the first, of which the history is kept: nearly
  every draft is right. The most that there is to gain.
- wrong: tokens drawn from four alone: what followed two or more of them before is always found, and
  is right one time in four.
- none: tokens drawn from the whole vocabulary: nothing is found.

Two engines take turns; medians of the rounds, each with prompts of its own.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from rollout import Rollout, SamplingParams

PROMPT = 64
TEXTS = ("right", "wrong", "none")
CHOICE = (11, 12, 13, 14)  # of the text "wrong"


def seconds(engine: Rollout, text: str, prompts: list[list[int]], new: int, seed: int) -> float:
    params = SamplingParams(
        max_tokens=new,
        ignore_eos=True,
        seed=seed,
        allowed_token_ids=CHOICE if text == "wrong" else None,
    )
    if text == "right":
        engine.generate(prompts, params)
    began = time.perf_counter()
    engine.generate(prompts, params)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    most = max(args.sequences)
    settings = {
        "device": args.device, "skip_tokenizer_init": True, "enable_prefix_caching": False,
        "max_model_len": PROMPT + args.new_tokens, "seed": 0, "async_scheduling": False,
    }  # fmt: skip
    rng = random.Random(0)
    with (
        Rollout(args.checkpoint, **settings) as plain,
        Rollout(
            args.checkpoint, **settings, num_speculative_tokens=args.drafts,
            speculative_max_num_seqs=most, speculative_history_tokens=1 << 20,
        ) as drafting,
    ):  # fmt: skip
        for count in args.sequences:
            for text in TEXTS:
                before, pairs = drafting.metrics(), []
                for number in range(args.rounds):
                    prompts = [
                        [rng.randrange(20, 8000) for _ in range(PROMPT)] for _ in range(count)
                    ]
                    given = text, prompts, args.new_tokens, number
                    pairs.append((seconds(plain, *given), seconds(drafting, *given)))
                now = drafting.metrics()
                drafted = now.spec_draft_tokens_total - before.spec_draft_tokens_total
                right = now.spec_accepted_tokens_total - before.spec_accepted_tokens_total
                alone, with_drafts = map(statistics.median, zip(*pairs, strict=True))
                print(
                    f"{count:3} sequences, {text:5}: {alone / with_drafts:.2f} times the tokens/s, "
                    f"{right} of {drafted} drafted tokens right",
                    flush=True,
                )


if __name__ == "__main__":
    main()
