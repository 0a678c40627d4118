"""deterministic=True: equal bits for a sequence however it is run, and refusals by name.

The soak of a thousand schedules is ``benchmarks/deterministic.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from determinism.schedules import Ways, alone, compare, engine, run
from tiny_models import write_tiny

from rollout.config import EngineConfig
from rollout.engine.core import EngineCore
from rollout.errors import ConfigError
from rollout.models.build import build_tables
from rollout.models.config.model import ModelConfig

ENGINES, BATCHES = 10, 3  # of each dtype


@pytest.mark.parametrize(
    ("arch", "dtype", "engines"),
    [
        ("qwen3", torch.float32, ENGINES),
        pytest.param("qwen3", torch.bfloat16, ENGINES, marks=pytest.mark.more),
        pytest.param("glm4_moe", torch.float32, ENGINES // 3, marks=pytest.mark.more),
    ],
    ids=str,
)
def test_a_sequence_has_the_same_bits_under_every_schedule(
    arch: str, dtype: torch.dtype, engines: int, tmp_path: Path
) -> None:
    model = str(tmp_path)
    write_tiny(tmp_path, arch, dtype=dtype)
    wanted = alone(model, 64)
    ways = Ways()
    for seed in range(engines):
        compare(model, wanted, seed, BATCHES, ways)
    if engines == ENGINES:
        assert ways.preemptions > 0
    assert ways.cached_tokens > 0
    assert ways.steps_ahead > 0
    assert ways.largest == 64


def test_without_it_float32_bits_depend_on_the_batch(tmp_path: Path) -> None:
    """Or the test above could not fail."""
    write_tiny(tmp_path, "qwen3", hidden_size=96)
    wanted = alone(str(tmp_path), 32, deterministic=False)
    core = engine(str(tmp_path), deterministic=False, num_kv_blocks=400)
    try:
        assert run(core, list(range(32))) != wanted
    finally:
        core.close()


def test_a_prompt_longer_than_a_step_runs_alone(tmp_path: Path) -> None:
    """Its first steps sample nothing at all."""
    write_tiny(tmp_path, "qwen3")
    core = engine(str(tmp_path), deterministic=False, max_num_batched_tokens=1, num_kv_blocks=12)
    try:
        assert len(run(core, [0])) == 1
    finally:
        core.close()


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny(tmp_path / "moe", "deepseek_v3")
    core = EngineCore(
        EngineConfig(model=str(tmp_path / "moe"), device="cpu", dtype="float16", deterministic=True)
    )
    with pytest.raises(ConfigError, match=r"float16 \(use float32 or bfloat16\); latent attention"):
        core.start()
    core.close()
    write_tiny(tmp_path / "dense", "qwen3", num_key_value_heads=4)
    config = ModelConfig.from_directory(tmp_path / "dense")
    assert len(build_tables(config, 4, deterministic=True)) == 4
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 \(use 1, 2 or 4\)"):
        build_tables(config, 3, deterministic=True)
