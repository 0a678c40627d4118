"""Engines on a card, or a pretended one, and what they are asked."""

from __future__ import annotations

import atexit
import gc
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rollout import Rollout, SamplingParams
from rollout.engine.worker.graphs import draw_graphs

PRETENDED = torch.cuda.is_available() and torch.cuda.get_device_name() == "pretended"
PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 4]]
LENGTH = 3 if PRETENDED else 5  # tokens, of which the interpreter takes a second for a few
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, logprobs=0)
SPECIAL = SamplingParams(
    max_tokens=LENGTH,
    temperature=0.0,
    ignore_eos=True,
    min_tokens=LENGTH,
    logprobs=3,
    prompt_logprobs=2,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    logit_bias={7: 2.0},
)


def card_engine(path: Path, **settings: Any) -> Rollout:
    return Rollout(str(path), **card_settings(**settings))


def card_settings(**settings: Any) -> dict[str, Any]:
    if PRETENDED:
        _hasten()
    options = {
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "kv_cache_bytes": 1 << 24,
        "max_num_seqs": 4,
        "cuda_graph_sizes": (4,),
        "cuda_graph_prefill": 0 if PRETENDED else 512,
    }
    return {"dtype": "float32", "device": "cuda", **options, **settings}


@cache
def _hasten() -> None:
    """What is loaded stays: a pretended card's figures of memory look for garbage each time, which
    took half of an engine's start. And nothing compiles there that would ask for a second warm-up.
    """
    draw_graphs._WARM_UPS = 1
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # what is left at the end goes as it would


def plain_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def greedy_tokens(engine: Rollout) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]
