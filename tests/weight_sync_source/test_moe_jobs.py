"""Fused experts of sharded trainers arrive as the file has them, one by one."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import write_tiny
from weight_sync_source.jobs.launch import run_job

from rollout.models.weight_io.table import tiling_fault
from rollout.weights import Box

SOURCES = ("DistributedDataParallel", "fsdp2", "fsdp1", "zero3")
Job = tuple[Path, Path, list[Any]]


@pytest.fixture(scope="module", params=["mixtral"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    model, out = tmp_path_factory.mktemp("moe"), tmp_path_factory.mktemp("moe_job")
    write_tiny(model, request.param, num_local_experts=5)  # no shard is even
    return model, out, run_job("moe_job.py", out, str(model))


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_sent_equals_the_files_bit_for_bit(job: Job, name: str) -> None:
    model, out, (first, second) = job
    wanted = load_file(model / "model.safetensors")
    found = load_file(out / f"{name}.safetensors")
    assert set(found) == set(wanted)
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor.bfloat16()), key
    assert first[name]["names"] == second[name]["names"]
    assert first[name]["metadata"] == first[name]["names"] == second[name]["metadata"]


@pytest.mark.parametrize("name", ["fsdp2", "fsdp1", "zero3"])
def test_the_boxes_of_all_ranks_partition_every_expert(job: Job, name: str) -> None:
    ranks = [rank[name]["boxes"] for rank in job[2]]
    shapes = dict(job[2][0][name]["metadata"])
    assert set(ranks[0]) == set(ranks[1]) == set(shapes)
    for tensor, shape in shapes.items():
        boxes = [Box(tuple(a), tuple(b)) for rank in ranks for a, b in rank[tensor]]
        assert tiling_fault(boxes, tuple(shape)) is None, tensor
        assert sum(prod(box.shape) for box in boxes) == prod(shape)
