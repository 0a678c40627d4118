"""A mesh of two by two ranks: hybrid sharding, and FSDP2 of what is tensor-parallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from weight_sync_source.jobs.held import assembled
from weight_sync_source.jobs.launch import run_job
from weight_sync_source.jobs.tiny import Tiny, expected

BF16 = torch.bfloat16
Job = tuple[Path, list[Any]]
SCENARIOS = {
    "hsdp": Tiny(),
    "fsdp1_hybrid": Tiny(),
    "float8": Tiny(tied=False),
    "tp": Tiny(tied=False, hidden=12),
    "tp_uneven": Tiny(tied=False, hidden=10),
}


def wanted(name: str) -> dict[str, torch.Tensor]:
    return expected(SCENARIOS[name], BF16, tied=name in ("hsdp", "fsdp1_hybrid"))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    out = tmp_path_factory.mktemp("mesh_job")
    return out, run_job("mesh_job.py", out, world=4)


@pytest.mark.parametrize("name", SCENARIOS)
def test_four_ranks_gather_one_update_bit_for_bit(job: Job, name: str) -> None:
    out, results = job
    found = load_file(out / f"{name}.safetensors")
    assert set(found) == set(wanted(name))
    for key, tensor in wanted(name).items():
        assert torch.equal(found[key], tensor), key
    assert [rank[name]["sender"] for rank in results] == [True, False, False, False]
    assert all(rank[name]["metadata"] == results[0][name]["metadata"] for rank in results)


@pytest.mark.parametrize("name", ["hsdp", "fsdp1_hybrid", "float8", "tp"])
def test_what_four_ranks_hold_is_the_model_bit_for_bit(job: Job, name: str) -> None:
    values, counts = assembled(*job, name, wanted(name))
    for key, tensor in wanted(name).items():
        assert torch.equal(values[key], tensor), key
        parallel = name == "tp" and "_proj." in key
        first = "correction" in key  # buffers are the first rank's
        assert (counts[key] == (1 if parallel or first else 2)).all(), key


def test_unequal_strided_shards_are_said_to_be_unknown(job: Job) -> None:
    boxes = dict(job[1][0]["tp_uneven"]["boxes"])
    assert boxes["model.layers.0.up_proj.weight"] == []
    assert boxes["model.layers.0.down_proj.weight"] == [[[0, 0], [5, 5 * 3]]]


def test_parts_that_are_summed_are_rounded_once(job: Job) -> None:
    parts = [torch.randn(6, 4, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    found = load_file(job[0] / "summed.safetensors")["a.weight"]
    exact = sum(part.double() for part in parts)
    assert (found - exact).abs().max() <= (exact.bfloat16() - exact).abs().max() * (1 + 1e-5)


def test_a_tensor_of_which_the_sender_has_no_part_is_refused_with_the_remedy(job: Job) -> None:
    for rank in job[1]:
        said = rank["elsewhere"]
        assert said["type"] == "WeightMismatch"
        assert "b.weight lies on ranks [2, 3] alone, and rank 0, which sends" in said["message"]


def test_who_does_not_come_is_named_to_all_that_do(job: Job) -> None:
    for rank in (0, 1, 3):
        assert job[1][rank]["absent"].startswith("trainer rank 2 did not come to the update")
