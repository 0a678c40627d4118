"""Engines in stages of a pipeline give what engines of one stage give."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared_engines import eventually
from start_engines import outcome, start
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.config import EngineConfig
from rollout.errors import WorkerDied
from rollout.server.preflight import check

pytestmark = pytest.mark.usefixtures("forked_ranks")
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
LENGTHS = 200, 5, 77, 1, 130, 60, 9, 250  # in one step, of which stages run parts


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(300) for _ in range(length)] for length in LENGTHS]


def said(engine: Rollout, params: SamplingParams = GREEDY) -> list[Any]:
    """From an empty cache, and then from what it found."""
    engine.reset_prefix_cache()
    rows: list[Any] = []
    for _ in range(2):
        for output in engine.generate(prompts(), params):
            one = output.outputs[0]
            experts = None if one.routed_experts is None else one.routed_experts.tolist()
            rows.append((one.token_ids, one.logprobs.raw, output.prompt_logprobs, experts))
    return [*rows, [output.embedding for output in engine.embed(prompts()[:3])]]


@pytest.mark.parametrize(
    "arch", ["qwen3_moe", "gemma3", pytest.param("deepseek_v3", marks=pytest.mark.more)]
)
def test_long_steps_run_in_parts_and_give_the_bits_of_whole_ones(tmp_path: Path, arch: str) -> None:
    """Experts that come back, windows whose layers lie in both stages, dense layers first."""
    write_tiny(tmp_path, arch, **({"num_layers": 3} if arch == "deepseek_v3" else {}))
    told = arch != "gemma3"
    params, found = replace(GREEDY, return_routed_experts=told), []
    for stages in (1, 2):
        with start(tmp_path, 1, pipeline_parallel_size=stages) as engine:
            found.append(said(engine, params))
            if not told:
                continue
            ids = prompts()[0][:60]  # in one part: a cut may cost sums of latent attention a bit
            [output] = engine.generate([ids], params)
            experts = output.outputs[0].routed_experts[: len(ids)]
            assert experts.shape[1] == sum(output.sparse_layers) > 1  # of both stages
            other = (experts.astype(int) + 1) % 4
            for wanted in (experts, other):
                again = replace(params, routed_experts=wanted.astype(np.int16))
                [output] = engine.generate([ids], again)
                found[-1].append((output.prompt_logprobs, output.outputs[0].token_ids))
            assert found[-1][-1] != found[-1][-2]
    assert found[0] == found[1]


@pytest.mark.parametrize("arch", ["qwen3_next", "falcon_h1", "nemotron_h"])
def test_layers_with_states_lie_in_stages_as_others_do(tmp_path: Path, arch: str) -> None:
    """Recurrent layers alone, beside attention, and layers that are a feed-forward alone; their
    sums depend on how prompts are cut, so steps are short."""
    write_tiny(tmp_path, arch)
    found = []
    for stages in (1, 2):
        settings = {"pipeline_parallel_size": stages, "max_num_batched_tokens": 64}
        with start(tmp_path, 1, **settings) as engine:
            found.append(said(engine))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "quantization", ["none", "int8", pytest.param("mxfp4", marks=pytest.mark.more)]
)
def test_two_stages_of_two_ranks_update_and_save_as_one_stage_does(
    tmp_path: Path, quantization: str
) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
        write_tiny(tmp_path / name, "llama", seed=seed, num_layers=3, **sizes)
    settings = {"quantization": quantization}
    with start(tmp_path / "b", 2, **settings) as cold:
        wanted = outcome(cold)
    with start(tmp_path / "a", 2, pipeline_parallel_size=2, **settings) as engine:
        info = engine.weight_info()
        assert (info.tensor_parallel_size, info.pipeline_parallel_size, info.num_ranks) == (2, 2, 4)
        before = outcome(engine)
        for encoding in ("full", "delta"):
            engine.update_weights(tmp_path / "b", encoding=encoding)
            assert outcome(engine) == wanted != before
            assert engine.check_weights(str(tmp_path / "b")).equal
            engine.rollback()
            assert outcome(engine) == before
        engine.update_weights(tmp_path / "b")
        engine.sleep(2)
        engine.wake_up(["weights"])
        engine.update_weights(tmp_path / "b")
        engine.wake_up(["kv_cache"])
        assert outcome(engine) == wanted
        if quantization == "none":
            engine.save_sharded_state(tmp_path / "saved")
    if quantization == "none":
        with start(tmp_path / "saved", 2, load_format="sharded_state") as loaded:
            assert outcome(loaded) == wanted


@pytest.mark.parametrize(("arch", "ranks"), [("qwen3_next", 1), ("deepseek_v3", 2)])
def test_check_counts_the_blocks_that_stages_have(tmp_path: Path, arch: str, ranks: int) -> None:
    """Layers without pages in one stage, and experts told by the first one's ranks alone."""
    write_tiny(tmp_path, arch, num_layers=3)
    settings: dict[str, Any] = {
        "pipeline_parallel_size": 2, "tensor_parallel_size": ranks, "device": "cpu",
        "num_threads": 1, "kv_cache_bytes": 3 << 20, "max_model_len": 256,
    }  # fmt: skip
    found = check(EngineConfig(model=str(tmp_path), **settings))
    with Rollout(str(tmp_path), **settings) as engine:
        core = engine._async.backend.core
        assert found.size.num_blocks == engine.metrics().num_kv_blocks
        assert found.memory == core.memory
        assert found.rank_bytes == tuple(rank["weight_bytes"] for rank in core.rank_info)


def test_a_rank_of_a_later_stage_that_is_killed_ends_the_engine(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3")
    with start(tmp_path, 1, pipeline_parallel_size=2) as engine:
        ranks = engine._async.backend.core.rank_info
        assert [rank["rank"] for rank in ranks] == [0, 1]
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        eventually(lambda: engine.metrics().state == "dead", 20.0)
        with pytest.raises(WorkerDied, match="rank 1"):
            engine.generate([[1, 2, 3]], GREEDY)
