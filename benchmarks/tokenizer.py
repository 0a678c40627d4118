"""What an engine's verbs of a tokenizer take, beside transformers' wrapper of the same one.

    python benchmarks/tokenizer.py [--tokenizer DIRECTORY] [--rounds 9] [--calls 200]

Without a directory: byte-level BPE of 32768 tokens, learnt from made-up words. Prints one JSON line
a verb: medians in microseconds, both sides in turns, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout.engine.tokenizer import Tokenizer

TEXT = "The quick brown fox jumps over the lazy dog. "


def made(size: int = 32768) -> PreTrainedTokenizerFast:
    rust = Rust(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    draw, letters = random.Random(0), "etaoinshrdlu"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(60000)]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
    )
    rust.train_from_iterator([" ".join(words), TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|end|>")


def seconds(call: Callable[[], Any], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=200)
    args = parser.parse_args()
    ours = Tokenizer(made()) if args.tokenizer is None else Tokenizer.load(args.tokenizer)
    assert ours is not None, "there is no tokenizer there"
    theirs, long = ours.hugging_face, TEXT * 40
    ids = ours.encode(long)
    verbs: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
        "length": (lambda: len(ours), lambda: len(theirs), args.calls),
        "eos_token_id": (lambda: ours.eos_token_id, lambda: theirs.eos_token_id, args.calls),
        "longest token": (
            lambda: ours.check_length(TEXT, 64),
            lambda: max(map(len, theirs.get_vocab())),
            max(1, args.calls // 50),
        ),
        "encode 45 characters": (lambda: ours.encode(TEXT), lambda: theirs(TEXT), args.calls),
        "encode 1800 characters": (lambda: ours.encode(long), lambda: theirs(long), args.calls),
        "decode 5 tokens": (
            lambda: ours.decode(ids[:5]),
            lambda: theirs.decode(ids[:5], skip_special_tokens=True),
            args.calls,
        ),
    }
    for name, (own, other, calls) in verbs.items():
        turns = [(seconds(own, calls), seconds(other, calls)) for _ in range(args.rounds)]
        a, b = (median(side) * 1e6 for side in zip(*turns, strict=True))
        row = {"verb": name, "us": round(a, 2), "wrapper_us": round(b, 2), "ratio": round(b / a, 1)}
        print(json.dumps(row | {"tokens": len(ours)}), flush=True)


if __name__ == "__main__":
    main()
