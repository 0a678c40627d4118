"""Tokens per second with drafts, as a share of those without: by prompt lookup, or by a model.

    python benchmarks/speculative.py CHECKPOINT --sequences 1 8 16 32 --rounds 5
    python benchmarks/speculative.py CHECKPOINT --draft-layers 2
    python benchmarks/speculative.py CHECKPOINT --head

How much drafts bring depends on the text, which made-up weights do not have. So there are three
texts, between which any other lies:

- right: the second answer to prompts, the same as the first, of which the history is kept: nearly
  every draft is right. The most that there is to gain.
- wrong: tokens drawn from four alone: what followed two or more of them before is always found, and
  is right one time in four.
- none: tokens drawn from the whole vocabulary: nothing is found.

With --draft-layers N the checkpoint's first N layers, with its embedding and head, draft:

- right: for a policy whose other layers add nothing, so that it says what its draft says;
- wrong: for the checkpoint as it is, with which they have nothing in common.

With --head a prediction head drafts, which the checkpoint (Qwen3.5's, hybrid of make_checkpoint.py)
is given as its release would have it, of the sizes of its last layer:

- right: of a policy whose layers add nothing, so that its next token follows from the last one, a
  head that guesses by that;
- wrong: a head of random weights for the checkpoint as it is.

Two engines take turns; medians of the rounds, each with prompts of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rollout import Rollout, SamplingParams

PROMPT = 64
CHOICE = (11, 12, 13, 14)  # of the text "wrong"


def seconds(
    engine: Rollout, prompts: list[list[int]], new: int, seed: int, text: str = ""
) -> float:
    """``text``: one of those that are looked up."""
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


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def beginning(checkpoint: Path, layers: int, where: Path) -> tuple[Path, Path]:
    """A draft model of the first ``layers``, and a policy that those are all of."""
    tensors = tensors_of(checkpoint)
    later = {
        name
        for name in tensors
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= layers
    }
    quiet = {
        name: tensor * 0 if name in later and name.endswith(("o_proj.weight", "down_proj.weight"))
        else tensor
        for name, tensor in tensors.items()
    }  # fmt: skip
    few = {name: tensor for name, tensor in tensors.items() if name not in later}
    config = json.loads((checkpoint / "config.json").read_text())
    kinds = config.get("layer_types")
    short = (
        config | {"num_hidden_layers": layers} | ({"layer_types": kinds[:layers]} if kinds else {})
    )
    for name, held, told in (("policy", quiet, config), ("draft", few, short)):
        (where / name).mkdir()
        save_file(held, where / name / "model.safetensors")
        (where / name / "config.json").write_text(json.dumps(told))
    return where / "policy", where / "draft"


def with_heads(checkpoint: Path, where: Path) -> Iterator[tuple[str, Path]]:
    """Releases of Qwen3.5's kind, whose heads are always right, and never."""
    tensors = tensors_of(checkpoint)
    attends = next(name for name in tensors if name.endswith("self_attn.o_proj.weight"))
    layer, hidden = attends.removesuffix("self_attn.o_proj.weight"), len(tensors[attends])
    norm, wide = tensors["model.norm.weight"], torch.eye(hidden, 2 * hidden, dtype=torch.bfloat16)
    head = {
        **{f"mtp.layers.0.{n.removeprefix(layer)}": t for n, t in tensors.items() if layer in n},
        **{f"mtp.pre_fc_norm_{of}.weight": norm * 0 for of in ("embedding", "hidden")},
        "mtp.norm.weight": norm,
        "mtp.fc.weight": wide,
    }
    ends = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    quiet = {n: t * 0 if n.endswith(ends) else t for n, t in (tensors | head).items()}
    drawn = {"mtp.fc.weight": torch.randn(hidden, 2 * hidden).bfloat16() / hidden**0.5}
    for name, held in (("right", quiet), ("wrong", tensors | head | drawn)):
        shutil.copytree(checkpoint, where / name, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file({n: t.clone() for n, t in held.items()}, where / name / "model.safetensors")
        yield name, where / name


def pairs(args: argparse.Namespace, where: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Texts, the policy of each, and how it is drafted for."""
    if args.head:
        for text, release in with_heads(Path(args.checkpoint), where):
            yield text, str(release), {"draft_component": "mtp"}
        return
    if not args.draft_layers:
        for text in ("right", "wrong", "none"):
            yield text, args.checkpoint, {"speculative_history_tokens": 1 << 20}
        return
    policy, draft = beginning(Path(args.checkpoint), args.draft_layers, where)
    drafts = {"components": {"draft": str(draft)}, "draft_component": "draft"}
    yield "right", str(policy), drafts
    yield "wrong", args.checkpoint, drafts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--draft-layers", type=int, default=0)
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    settings = {
        "device": args.device, "skip_tokenizer_init": True, "enable_prefix_caching": False,
        "max_model_len": PROMPT + args.new_tokens, "seed": 0, "async_scheduling": False,
    }  # fmt: skip
    drafts = {
        "num_speculative_tokens": args.drafts, "speculative_max_num_seqs": max(args.sequences),
    }  # fmt: skip
    where = Path(tempfile.mkdtemp())
    try:
        for text, policy, by in pairs(args, where):
            with (
                Rollout(policy, **settings) as plain,
                Rollout(policy, **settings, **drafts, **by) as drafting,
            ):
                for count in args.sequences:
                    compare(args, plain, drafting, count, text)
    finally:
        shutil.rmtree(where)


def compare(
    args: argparse.Namespace, plain: Rollout, drafting: Rollout, count: int, text: str
) -> None:
    """Print what drafts for ``count`` sequences bring."""
    rng, before, found = random.Random(count), drafting.metrics(), []
    for number in range(args.rounds):
        prompts = [[rng.randrange(20, 8000) for _ in range(PROMPT)] for _ in range(count)]
        given = prompts, args.new_tokens, number, "" if args.draft_layers or args.head else text
        found.append((seconds(plain, *given), seconds(drafting, *given)))
    now = drafting.metrics()
    drafted = now.spec_draft_tokens_total - before.spec_draft_tokens_total
    right = now.spec_accepted_tokens_total - before.spec_accepted_tokens_total
    alone, with_drafts = map(statistics.median, zip(*found, strict=True))
    print(
        f"{count:3} sequences, {text:5}: {alone / with_drafts:.2f} times the tokens/s, "
        f"{right} of {drafted} drafted tokens right",
        flush=True,
    )


if __name__ == "__main__":
    main()
