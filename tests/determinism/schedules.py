"""Random ways to run the same sequences: mates, cuts, cache, preemption, one after another."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from engine_core.harness import Sink as ShortSink

from rollout.config import EngineConfig
from rollout.engine.core import EngineCore
from rollout.generation import Request, RequestOutput, SamplingParams

VOCAB = 320
MAX_LEN = 96
PREFIX = [(7 * i + 3) % VOCAB for i in range(24)]  # shared by many prompts

PATIENCE = 60.0  # seconds for a batch on a busy machine

Bits = tuple[Any, ...]


class Sink(ShortSink):
    def wait(self, seconds: float) -> None:
        assert self._done.wait(seconds), "the batch did not end"


@dataclass
class Ways:
    """What a set of schedules has gone through, so that a test can see that it met them all."""

    schedules: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    largest: int = 0
    steps_ahead: int = 0


def sequence(number: int, seed: int = 0) -> tuple[list[int], dict[str, Any]]:
    """Prompt and settings of sequence ``number``: every sampler path occurs among them."""
    rng = random.Random(1000 * seed + number)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
    if rng.random() < 0.6:
        prompt = PREFIX[: rng.randint(1, 24)] + prompt
    params: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.0]),
        "seed": number,
        "max_tokens": rng.randint(2, 14),
        "logprobs": rng.choice([None, 0, 3]),
    }
    extra = rng.choice(["", "", "top_p", "top_k", "min_p", "penalty", "prompt", "bias"])
    if extra == "top_p":
        params["top_p"] = 0.8
    elif extra == "top_k":
        params["top_k"] = 20
    elif extra == "min_p":
        params["min_p"] = 0.05
    elif extra == "penalty":
        params.update(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2)
    elif extra == "prompt":
        params["prompt_logprobs"] = 2
    elif extra == "bias":
        params["logit_bias"] = {5: 1.5, 9: -2.0}
    return prompt, params


def engine(model: str, **settings: Any) -> EngineCore:
    core = EngineCore(
        EngineConfig(
            model=model,
            device="cpu",
            block_size=8,
            max_model_len=MAX_LEN,
            skip_tokenizer_init=True,
            **{"deterministic": True, "num_threads": 1, **settings},
        )
    )
    core.start()
    return core


def run(core: EngineCore, numbers: list[int]) -> dict[int, Bits]:
    """All bits of the results of these sequences, submitted at once."""
    calls = []
    for number in numbers:
        prompt, params = sequence(number)
        calls.append(
            Request(
                request_id=str(number),
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(**params),
            )
        )
    sink = Sink(len(calls))
    core.submit(calls, sink, stream=False)
    sink.wait(PATIENCE)
    return {int(name): bits(out) for name, out in sink.results().items()}


def bits(out: RequestOutput) -> Bits:
    sample = out.outputs[0]
    found = sample.logprobs
    return (
        sample.token_ids, found.raw, found.processed, found.log_kept_mass, found.top,
        out.prompt_logprobs,
    )  # fmt: skip


def random_engine(rng: random.Random) -> dict[str, Any]:
    """Settings that decide how steps are cut and what is thrown away."""
    return {
        "max_num_batched_tokens": rng.choice([3, 8, 17, 64, 512, 2048]),
        "num_kv_blocks": rng.choice([12, 14, 20, 40, 400]),
        "enable_prefix_caching": rng.random() < 0.6,
        "max_num_seqs": rng.choice([1, 2, 5, 16, 64]),
        "num_threads": rng.choice([1, 1, 1, 2]),
        "async_scheduling": rng.random() < 0.4,
    }


def random_batch(rng: random.Random, known: int) -> list[int]:
    size = rng.choice([1, 2, 3, 5, 8, 13, 21, 34, 64])
    return rng.sample(range(known), min(size, known))


def compare(model: str, wanted: dict[int, Bits], seed: int, batches: int, ways: Ways) -> None:
    """``batches`` schedules on one random engine; raises AssertionError naming what differs."""
    rng = random.Random(seed)
    settings = random_engine(rng)
    threads = torch.get_num_threads()
    core = engine(model, **settings)
    try:
        for _ in range(batches):
            numbers = random_batch(rng, len(wanted))
            for number, got in run(core, numbers).items():
                assert got == wanted[number], (
                    f"sequence {number} among {len(numbers)} (seed {seed}, {settings}):\n"
                    f"{got}\nalone:\n{wanted[number]}"
                )
            ways.schedules += 1
            ways.largest = max(ways.largest, len(numbers))
        stats = core.stats()
        ways.preemptions += stats.preemptions_total
        ways.cached_tokens += stats.prefix_cache_hits_total
        ways.steps_ahead += core.loop.steps_ahead
    finally:
        core.close()
        torch.set_num_threads(threads)


def alone(model: str, count: int, **settings: Any) -> dict[int, Bits]:
    """Every sequence by itself, nothing cached, prompts in one piece."""
    core = engine(model, enable_prefix_caching=False, num_kv_blocks=64, **settings)
    try:
        return {n: run(core, [n])[n] for n in range(count)}
    finally:
        core.close()
