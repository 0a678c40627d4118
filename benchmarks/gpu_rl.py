"""What RL asks of an engine: long answers of many streams, preempted, and updated meanwhile."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from gpu_models import BF16, BLOCK, DEVICE, config_directory, llama_config, made_up

from rollout import RequestOutput, Rollout, SamplingParams


def rl_run(report: Any, name: str) -> None:
    """Rates with and without an update in the middle; every token of the call with the update is
    scored again by the weights that made it. A KV cache for three quarters of the streams preempts.
    """
    streams, prompt, new = (4, 8, 248) if report.dry else (64, 1024, 2048)
    first, second = _weights(name), _weights(name)
    settings = {
        **{key: value for key, value in made_up(report).items() if key != "kv_cache_bytes"},
        "max_model_len": prompt + new,
        "max_num_seqs": streams,
        "block_size": BLOCK,
        "num_kv_blocks": max(2, -(-(prompt + new) // BLOCK) * streams * 3 // 4),
    }
    prompts = [[(7 * i + j) % 250 + 1 for j in range(prompt)] for i in range(streams)]
    params = SamplingParams(max_tokens=new, temperature=1.0, ignore_eos=True, seed=1)
    label = f"{name}, {streams} x {prompt} and {new} tokens"
    with config_directory(name) as folder, Rollout(str(folder), **settings) as engine:
        engine.update_weights(first)
        engine.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
        engine.reset_prefix_cache()
        began = time.perf_counter()
        engine.generate(prompts, params)
        quiet = time.perf_counter() - began
        report.add(f"{label}", streams * new / quiet, "tokens/s")
        report.add(f"{label}, preempted", engine.metrics().preemptions_total, "times")
        engine.reset_prefix_cache()
        halfway = engine.metrics().generation_tokens_total + streams * new // 2
        update = threading.Thread(target=_update_at, args=(engine, second, halfway))
        update.start()
        began = time.perf_counter()
        outputs = engine.generate(prompts, params)
        beside = time.perf_counter() - began
        update.join()
        report.add(f"{label}, an update in its middle", streams * new / beside, "tokens/s")
        newest = engine.weight_version
        by_newer = _distances(engine, outputs)
        engine.rollback()
        by_older = _distances(engine, outputs)
    right = [by_newer[newest], by_older[newest - 1]]
    wrong = np.concatenate([by_newer[newest - 1], by_older[newest]])
    if sum(map(len, right)) != streams * new:
        raise AssertionError("there are tokens of neither version")
    for version, off in zip(("newer", "older"), right, strict=True):
        report.add(f"tokens of the {version} weights, scored again", len(off), "tokens")
        if len(off):
            report.add(f"largest distance by the {version} weights", float(off.max()), "nat")
            report.add(f"mean distance by the {version} weights", float(off.mean()), "nat")
            if not off.mean() < wrong.mean() / 10:
                raise AssertionError(f"tokens are not of the {version} weights, as they say")
    report.add("mean distance by the other weights", float(wrong.mean()), "nat")


def _update_at(engine: Rollout, trained: Any, tokens: int) -> None:
    """Once so many were generated."""
    while engine.metrics().generation_tokens_total < tokens:
        time.sleep(0.01)
    engine.update_weights(trained, in_flight="recompute")


def _distances(engine: Rollout, outputs: list[RequestOutput]) -> dict[int, np.ndarray]:
    """By the version that made them, the distances of all tokens' logprobs from those by what is
    live now.
    """
    answers = [output.outputs[0] for output in outputs]
    scored = engine.score(
        [list(output.prompt_token_ids) for output in outputs],
        [list(answer.token_ids) for answer in answers],
    )
    off: dict[int, list[np.ndarray]] = defaultdict(lambda: [np.empty(0, np.float32)])
    for answer, score in zip(answers, scored, strict=True):
        apart = np.abs(np.asarray(answer.logprobs.raw, np.float32) - score.logprobs)
        for span in answer.weight_versions:
            off[span.version].append(apart[span.start : span.stop])
    return defaultdict(
        lambda: np.empty(0, np.float32), {v: np.concatenate(of) for v, of in off.items()}
    )


def _weights(name: str) -> Any:
    from transformers import LlamaForCausalLM

    with torch.device(DEVICE):
        return LlamaForCausalLM(llama_config(name)).to(BF16)
