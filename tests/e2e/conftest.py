"""Engines and trainer jobs, started once; combinations run inside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import forked_ranks
from shared_engines import left_serving
from start_engines import outcome, start, trainer_job
from tiny_models import write_tiny
from trainer_processes import Job

from rollout import Rollout


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("checkpoints")
    for name, seed in (("a", 0), ("b", 1)):
        write_tiny(where / name, "qwen3", tied=True, seed=seed)
    return {"a": where / "a", "b": where / "b"}


@pytest.fixture(scope="session", params=[(1, 1), (2, 1), (1, 2)], ids=["tp1", "tp2", "pp2"])
def engine(request, checkpoints) -> Iterator[Rollout]:
    tp, stages = request.param
    with forked_ranks():
        started = start(checkpoints["a"], tp, pipeline_parallel_size=stages)
    with started as rollout:
        yield rollout


@pytest.fixture(autouse=True)
def _engine_is_left_serving(request) -> Iterator[None]:
    shared = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    yield from left_serving(request.node.name, shared)


@pytest.fixture(scope="session")
def fresh(engine, checkpoints) -> dict[str, Any]:
    """What engines that were started from each checkpoint say, at ``engine``'s TP."""
    tp = engine.weight_info().tensor_parallel_size
    said = {}
    for name, path in checkpoints.items():
        with forked_ranks(), start(path, tp) as rollout:
            said[name] = outcome(rollout)
    return said


@pytest.fixture(scope="session")
def jobs(checkpoints, tmp_path_factory) -> Iterator[dict[str, Job]]:
    logs = tmp_path_factory.mktemp("jobs")
    kinds = {"module": 1, "ddp": 2, "fsdp2": 2, "zero3": 2}
    started = {
        kind: trainer_job(kind, world, checkpoints["a"], logs / f"{kind}.log")
        for kind, world in kinds.items()
    }
    try:
        for kind, job in started.items():
            if None in job.answers(270):
                raise AssertionError((logs / f"{kind}.log").read_text())
        yield started
    finally:
        for job in started.values():
            job.close()
