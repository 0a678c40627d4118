"""Models whose layers forget what a window has left behind, in fewer blocks, against transformers;
and what it saves of the models that people run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_core.harness import request, run
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.config import EngineConfig
from rollout.engine.core import EngineCore
from rollout.engine.scheduling.grouped_blocks import GroupedBlockManager
from rollout.engine.worker.kv_cache import KVShape
from rollout.models.config.model import ModelConfig
from rollout.models.decoder.kv_groups import blocks_of_sequence, kv_groups

pytestmark = pytest.mark.usefixtures("forked_ranks")

RELEASES = Path(__file__).parent / "releases"
# Sliding layers; groups; layers of a page; blocks of 32 that 32,768 tokens hold, in steps of 2048.
RELEASED = {
    "gemma-3-27b-it": (52, 7, 10, 1024 + 6 * 97),
    "gpt-oss-20b": (12, 2, 12, 1024 + 69),
    "Llama-4-Scout-17B-16E-Instruct": (36, 4, 12, 1024 + 3 * 321),
    "Olmo-3-32B-Think": (48, 4, 16, 1024 + 3 * 193),
    "Ministral-8B-Instruct-2410": (0, 1, 36, 1024),  # no text is longer than its window
    "phi-4": (0, 1, 40, 1024),
}
ARCHS: dict[str, tuple[int, dict[str, Any]]] = {  # groups
    "gemma3": (6, {}),
    "gpt_oss": (2, {}),
    "llama4": (4, {"attention_chunk_size": 16}),
    "mistral": (1, {"sliding_window": 9}),
}
LONGEST, BLOCK, STEP = 128, 4, 16


@pytest.mark.parametrize("name", RELEASED)
def test_pages_of_models_that_people_run(name: str) -> None:
    sliding, count, layers, blocks = RELEASED[name]
    config = ModelConfig.from_hf(json.loads((RELEASES / f"{name}.json").read_text()))
    groups = kv_groups(config)
    assert sum(len(group.layers) for group in groups if group.forgets) == sliding
    assert sorted(layer for group in groups for layer in group.layers) == list(
        range(config.num_layers)
    )
    assert len(groups) == count
    assert KVShape.of(config, 1, 32, torch.bfloat16).page_layers == layers
    assert blocks_of_sequence(groups, 32768, 2048, 32) == blocks


class Served:
    """A tiny model on an engine with few blocks."""

    def __init__(self, path: Path, arch: str) -> None:
        self.path = path
        self.count, more = ARCHS[arch]
        self.model = write_tiny(path, arch, **more)
        groups = kv_groups(ModelConfig.from_directory(path))
        assert len(groups) == self.count
        # Two of the longest, and less than one would take without windows.
        self.blocks = 2 * blocks_of_sequence(groups, 100, STEP, BLOCK)
        assert self.blocks < 2 * self.count * 25
        self.core = self.start(self.blocks)

    def start(self, blocks: int, **settings: Any) -> EngineCore:
        config = EngineConfig(
            model=str(self.path), device="cpu", num_kv_blocks=blocks, block_size=BLOCK,
            max_model_len=100, max_num_batched_tokens=STEP, max_num_seqs=8, num_threads=1,
            **settings,
        )  # fmt: skip
        core = EngineCore(config)
        core.start()
        return core

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """transformers', of each token but the first."""
        ids = torch.tensor([tokens])
        with torch.no_grad():
            rows = self.model(ids).logits[0, :-1].log_softmax(-1)
        return rows.gather(1, ids[0, 1:, None])[:, 0]


@pytest.fixture(scope="module", params=ARCHS)
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp(request.param), request.param)
    yield served
    served.core.close()


def prompts(count: int) -> list[list[int]]:
    return [[(1 + 11 * i + 7 * j) % 320 for j in range(30 + 9 * i)] for i in range(count)]


def test_tokens_past_many_windows_are_those_of_transformers(served: Served) -> None:
    """In chunks, several samples each, with too few blocks for all at a time."""
    core = served.core
    assert isinstance(core.blocks, GroupedBlockManager)
    calls = [
        request(str(i), p, temperature=0.8, seed=i, n=4 if i == 1 else 1, max_tokens=34,
                prompt_logprobs=0, ignore_eos=True)
        for i, p in enumerate(prompts(4))
    ]  # fmt: skip
    outs = run(core, *calls)
    assert core.stats().preemptions_total > 0
    for call in calls:
        given = list(call.prompt_token_ids)
        out = outs[call.request_id]
        for sample in out.outputs:
            wanted = served.logprobs([*given, *sample.token_ids])
            scored = [
                row[t] for row, t in zip(out.prompt_logprobs or [], given, strict=True) if row
            ]
            got = torch.tensor([*scored, *sample.logprobs.raw])
            torch.testing.assert_close(got, wanted, atol=2e-4, rtol=0)
    assert core.blocks.num_free == served.blocks
    core.scheduler.check_integrity()


def test_a_prefix_that_is_found_gives_the_bits_of_one_that_is_computed(served: Served) -> None:
    core = served.start(served.blocks, deterministic=True)
    try:
        found = []
        for wanted in (0, 56, 56):
            out = run(core, request(prompt=prompts(4)[3], temperature=0.0, max_tokens=30))["a"]
            assert out.num_cached_tokens == wanted
            found.append((out.outputs[0].token_ids, out.outputs[0].logprobs.raw))
        assert found[0] == found[1] == found[2]
    finally:
        core.close()


def test_all_blocks_of_layers_in_one_native_call_read_their_windows_alone(tmp_path: Path) -> None:
    """In few blocks, whose old entries others have overwritten, as in many."""
    write_tiny(tmp_path, "mistral", sliding_window=9, dtype=torch.bfloat16)
    found = []
    for blocks in (18, 400):
        config = EngineConfig(
            model=str(tmp_path), device="cpu", num_kv_blocks=blocks, block_size=BLOCK,
            max_model_len=100, max_num_batched_tokens=STEP, num_threads=1, deterministic=True,
        )  # fmt: skip
        core = EngineCore(config)
        core.start()
        try:
            calls = [
                request(str(i), p, temperature=0.0, max_tokens=30) for i, p in enumerate(prompts(4))
            ]
            outs = run(core, *calls)
            found.append([outs[c.request_id].outputs[0].logprobs.raw for c in calls])
        finally:
            core.close()
    assert found[0] == found[1]


@pytest.mark.more
def test_two_ranks_forget_alike(served: Served) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with Rollout(
        str(served.path), tensor_parallel_size=2, device="cpu", num_kv_blocks=served.blocks,
        block_size=BLOCK, max_model_len=100, max_num_batched_tokens=STEP,
    ) as two:  # fmt: skip
        outs = two.generate(prompts(4), params)
    for given, out in zip(prompts(4), outs, strict=True):
        wanted = served.logprobs([*given, *out.outputs[0].token_ids])[len(given) - 1 :]
        got = torch.tensor(out.outputs[0].logprobs.raw)
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=0)
