"""DeepSpeed ZeRO-1, 2 and 3 over two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from weight_sync_source.jobs.held import assembled
from weight_sync_source.jobs.launch import run_job
from weight_sync_source.jobs.tiny import Tiny, expected

BF16, FP32 = torch.bfloat16, torch.float32
Job = tuple[Path, list[Any]]
SCENARIOS = [
    ("zero3", "ZeroSource", FP32),
    ("zero3_cast", "ZeroSource", BF16),
    ("zero3_used", "ZeroSource", BF16),
    ("zero3_persistent", "ZeroSource", FP32),
    ("zero3_bf16", "ZeroSource", BF16),
    ("zero2", "PlainSource", BF16),
    ("zero1_bf16", "PlainSource", BF16),
    ("zero1_sequences", "PlainSource", BF16),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    out = tmp_path_factory.mktemp("zero_job")
    left = set(Path("/dev/shm").glob("deepspeed_*"))
    yield out, run_job("zero_job.py", out, timeout=100)
    for path in set(Path("/dev/shm").glob("deepspeed_*")) - left:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(("name", "kind", "dtype"), SCENARIOS)
def test_every_gathered_tensor_equals_the_unsharded_model_bit_for_bit(
    job: Job, name: str, kind: str, dtype: torch.dtype
) -> None:
    out, (first, second) = job
    wanted = expected(Tiny(), dtype)
    found = load_file(out / f"{name}.safetensors")
    assert first[name]["kind"] == second[name]["kind"] == kind
    assert set(found) == set(wanted)
    for key, tensor in wanted.items():
        assert found[key].dtype == dtype
        assert torch.equal(found[key], tensor), key
    sent = [[n, str(found[n].dtype), list(found[n].shape)] for n in first[name]["names"]]
    assert first[name]["metadata"] == second[name]["metadata"] == sent
    assert first[name]["sender"] is True
    assert second[name]["sender"] is False
    assert first[name]["buckets"] == second[name]["buckets"] > 3


def test_parameters_were_partitioned_before_and_are_again_afterwards(job: Job) -> None:
    for rank in job[1]:
        assert rank["partitioned"]
        assert rank["repartitioned"]


@pytest.mark.parametrize(("name", "kind", "dtype"), SCENARIOS)
def test_what_all_ranks_hold_is_the_unsharded_model_bit_for_bit(
    job: Job, name: str, kind: str, dtype: torch.dtype
) -> None:
    wanted = expected(Tiny(), dtype)
    values, counts = assembled(*job, name, wanted)
    for key, tensor in wanted.items():
        assert torch.equal(values[key], tensor), key
        first = "correction" in key  # buffers are the first rank's
        assert (counts[key] == (1 if kind == "ZeroSource" or first else 2)).all(), key


def test_a_model_that_was_sent_in_inference_mode_trains_on(job: Job) -> None:
    assert [rank["trains_on"] for rank in job[1]] == [None, None]


def test_of_a_buffer_that_differs_between_ranks_the_first_ones_is_sent(job: Job) -> None:
    wanted = expected(Tiny(), FP32)
    values, _ = assembled(*job, "zero3_own_buffers", wanted)
    assert torch.equal(values["model.correction"], wanted["model.correction"])


def test_what_was_changed_while_it_is_gathered_is_not_sent(job: Job) -> None:
    first, second = job[1]
    assert "was changed inside GatheredParameters: leave that before" in first["changed"]
    assert second["changed"] is None
    for rank in job[1]:
        assert rank["gathered"] is rank["no longer gathered"] is None


def test_an_error_on_one_rank_is_raised_alike_on_all(job: Job) -> None:
    first, second = (rank["raises"] for rank in job[1])
    assert first["type"] == second["type"] == "SourceFailed"
    assert first["message"] == second["message"]
    assert "rank 1" in first["message"]
    assert second["cause"] == "ValueError"
