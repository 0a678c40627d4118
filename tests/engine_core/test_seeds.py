"""Unseeded requests are as random as they look; a seed, of the engine or of a request, repeats."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_core.harness import request, run
from tiny_models import write_tiny

from rollout.config import EngineConfig
from rollout.engine.core import EngineCore

FEW = {"max_tokens": 12, "temperature": 1.5}


def drawn(model: str, seed: int | None) -> tuple[list[list[int]], list[int]]:
    """Unseeded samples of a fresh engine, and a seeded one."""
    config = EngineConfig(
        model=model, device="cpu", num_threads=1, num_kv_blocks=32, max_model_len=64, seed=seed
    )
    core = EngineCore(config)
    core.start()
    try:
        assert core.stats().seed == (core.seed if seed is None else seed)
        free = run(core, request("free", n=2, **FEW))["free"].outputs
        again = run(core, request("again", **FEW))["again"].outputs
        own = run(core, request("own", seed=3, **FEW))["own"].outputs
        return [sample.token_ids for sample in (*free, *again)], own[0].token_ids
    finally:
        core.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path)
    return str(path)


def test_engines_without_a_seed_never_draw_alike_and_with_one_always(model: str) -> None:
    first, second = drawn(model, None), drawn(model, None)
    seeded = drawn(model, 7)
    assert drawn(model, 7) == seeded
    samples = [tuple(tokens) for free, _ in (first, second, seeded) for tokens in free]
    assert len(set(samples)) == 9
    assert first[1] == second[1] == seeded[1]
