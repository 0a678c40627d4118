"""How often a draft model that is nearly the policy draws the policy's token.

    python benchmarks/make_checkpoint.py tiny CKPT
    python benchmarks/draft_agreement.py CKPT

The draft model is a copy with noise on its weights, a share of each tensor's own deviation. Both
draw one token after each of many prompts, by the same seed, as they do where one drafts for the
other; and tell their distributions, of which rejection sampling would keep the common part, and of
a draft of the likeliest token what the policy gives it. Temperatures make them flat or steep.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from rollout import RequestOutput, Rollout, SamplingParams


def noisy_copy(checkpoint: Path, where: Path, noise: float) -> None:
    shutil.copytree(checkpoint, where)
    generator = torch.Generator().manual_seed(0)
    for file in where.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            spread = noise * float(tensor.float().std().nan_to_num(0))
            drawn = torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor.float() + spread * drawn).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})


def distributions(
    outputs: list[RequestOutput], vocab: int, temperature: float
) -> NDArray[np.float64]:
    """[prompts, vocabulary], of the first token of each."""
    found = np.full((len(outputs), vocab), -np.inf)
    for row, output in enumerate(outputs):
        top = output.outputs[0].logprobs.top[0]
        found[row, list(top)] = list(top.values())
    found = np.exp((found - found.max(1, keepdims=True)) / temperature)
    return found / found.sum(1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--noise", type=float, default=0.01)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.01, 0.02, 0.03, 0.05, 0.1]
    )
    args = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(20, 8000) for _ in range(16)] for _ in range(args.prompts)]
    settings = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 64}
    where = Path(tempfile.mkdtemp())
    try:
        noisy_copy(args.checkpoint, where / "draft", args.noise)
        with (
            Rollout(str(args.checkpoint), **settings) as policy,
            Rollout(str(where / "draft"), **settings) as draft,
        ):
            vocab = json.loads((args.checkpoint / "config.json").read_text())["vocab_size"]
            for temperature in args.temperatures:
                params = [
                    SamplingParams(
                        max_tokens=1,
                        temperature=temperature,
                        seed=seed,
                        logprobs=vocab,
                        ignore_eos=True,
                    )
                    for seed in range(args.prompts)
                ]
                both = [engine.generate(prompts, params) for engine in (policy, draft)]
                drawn = [[out.outputs[0].token_ids for out in outputs] for outputs in both]
                p, q = (distributions(outputs, vocab, temperature) for outputs in both)
                right = np.mean([a == b for a, b in zip(*drawn, strict=True)])
                likeliest = p[np.arange(len(p)), q.argmax(1)].mean()
                print(
                    f"likeliest token {p.max(1).mean():.0%}: right {right:.0%}, by rejection "
                    f"sampling {np.minimum(p, q).sum(1).mean():.0%}, likeliest tokens as drafts "
                    f"{likeliest:.0%}",
                    flush=True,
                )
    finally:
        shutil.rmtree(where)


if __name__ == "__main__":
    main()
