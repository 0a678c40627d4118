"""LoRA models under every kind of trainer of two ranks: merged on the sender, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from weight_sync_source.jobs.launch import run_job
from weight_sync_source.jobs.lora import adapted, factors, merged

from rollout.weights.names import file_form, is_weight

BF16, FP32 = torch.bfloat16, torch.float32
Job = tuple[Path, list[Any]]
SCENARIOS = [
    ("ddp", FP32, BF16),
    ("compiled", FP32, BF16),
    ("fsdp2", FP32, BF16),
    ("fsdp2_again", FP32, FP32),
    ("fsdp2_partial", FP32, FP32),
    ("fsdp2_bf16", BF16, BF16),
    ("fsdp1", FP32, BF16),
    ("fsdp1_flat", FP32, BF16),
    ("fsdp1_partial", FP32, FP32),
    ("zero3", FP32, BF16),
    ("zero3_partial", FP32, FP32),
    ("zero3_bf16", BF16, BF16),
    ("fsdp2_dora", FP32, BF16),
    ("zero3_dora", FP32, FP32),
    ("zero2", FP32, BF16),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    out = tmp_path_factory.mktemp("peft_job")
    left = set(Path("/dev/shm").glob("deepspeed_*"))
    yield out, run_job("peft_job.py", out, timeout=100)
    for path in set(Path("/dev/shm").glob("deepspeed_*")) - left:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(("name", "base", "wire"), SCENARIOS)
def test_what_is_sent_is_the_merged_model_bit_for_bit(
    job: Job, name: str, base: torch.dtype, wire: torch.dtype
) -> None:
    out, (first, second) = job
    model = adapted(dtype=base, use_dora=name.endswith("_dora"))
    if name == "zero3_bf16":
        model.to(BF16)  # DeepSpeed casts the adapters, too
    wanted = merged(model, wire)
    if name.endswith("_partial"):
        wanted = {key: t for key, t in wanted.items() if "up_proj" in key or "down_proj" in key}
    found = load_file(out / f"{name}.safetensors")
    assert set(found) == set(wanted)
    for key, tensor in wanted.items():
        assert found[key].dtype == wire
        assert torch.equal(found[key], tensor), key
    assert first[name]["kind"] == second[name]["kind"] == "MergedSource"
    assert (first[name]["sender"], second[name]["sender"]) == (True, False)
    assert first[name]["buckets"] == second[name]["buckets"] > 3
    assert first[name]["metadata"] == second[name]["metadata"]
    if first[name]["metadata"] is not None:
        sent = [[n, str(wire), list(found[n].shape)] for n in first[name]["names"]]
        assert first[name]["metadata"] == sent


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp1", "zero3", "zero2"])
def test_of_an_adapter_its_factors_alone_are_gathered(job: Job, name: str) -> None:
    """However the base is sharded, and whatever it weighs."""
    out, (first, second) = job
    wanted = {f"adapter/a:{name}": tensor for name, tensor in factors(adapted()).items()}
    found = load_file(out / f"{name}_adapter.safetensors")
    assert set(found) == set(wanted)
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    rows = [[n, str(FP32), list(t.shape)] for n, t in found.items()]
    assert sorted(first[f"{name}_adapter"]["metadata"]) == sorted(rows)
    assert second[f"{name}_adapter"]["metadata"] == first[f"{name}_adapter"]["metadata"]


def test_a_base_whose_adapter_goes_beside_it_is_sent_unmerged(job: Job) -> None:
    found = load_file(job[0] / "fsdp2_beside.safetensors")
    state = adapted().base_model.model.state_dict()
    base = {file_form(n): t for n, t in state.items() if "lora" not in n and is_weight(n)}
    wanted = base | {f"adapter/a:{n}": t for n, t in factors(adapted()).items()}
    assert set(found) == set(wanted)
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def test_what_is_merged_is_held_by_no_rank_before(job: Job) -> None:
    boxes = [dict(rank["fsdp2"]["boxes"]) for rank in job[1]]
    for rank in boxes:
        assert rank["model.layers.0.up_proj.weight"] == []
        assert rank["model.embed_tokens.weight"] != []
        assert not [name for name in rank if "lora" in name]


def test_the_documented_source_gathers_and_addresses_its_rows(job: Job) -> None:
    out, (first, second) = job
    wanted = {
        "matrix": torch.arange(12.0).view(4, 3).bfloat16(),
        "vector": torch.arange(4.0).bfloat16(),
    }
    found = load_file(out / "documented.safetensors")
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert first["documented"]["metadata"] == second["documented"]["metadata"]
    assert dict(first["documented"]["boxes"])["matrix"] == [[[0, 0], [2, 3]]]
    assert dict(second["documented"]["boxes"])["matrix"] == [[[2, 0], [4, 3]]]
    assert dict(second["documented"]["boxes"])["vector"] == [[[2], [4]]]


def test_ranks_with_other_adapters_switched_on_are_told_which(job: Job) -> None:
    _, ranks = job
    for one in ranks:
        assert one["merged apart"].startswith(
            "trainer rank 1 passes merged adapters=[], rank 0 ['default']"
        )
