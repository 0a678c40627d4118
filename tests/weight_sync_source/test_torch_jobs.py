"""DDP, FSDP1 and FSDP2 jobs of two ranks: what is sent, and how ranks fail together."""

from __future__ import annotations

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
    ("ddp", "PlainSource", BF16, True),
    ("ddp_wrapped", "PlainSource", FP32, True),
    ("compiled_ddp", "PlainSource", BF16, True),
    ("fsdp2_fp32", "FSDP2Source", FP32, True),
    ("fsdp2_cast", "FSDP2Source", BF16, True),
    ("fsdp2_mixed", "FSDP2Source", FP32, True),
    ("fsdp2_dict", "FSDP2Source", BF16, True),
    ("fsdp2_items", "FSDP2Source", FP32, True),
    ("fsdp2_iterator", "FSDP2Source", BF16, False),
    ("fsdp2_untied", "FSDP2Source", BF16, False),
    ("fsdp2_wrapped", "FSDP2Source", BF16, True),
    ("hsdp", "FSDP2Source", BF16, True),
    ("fsdp1", "FSDP1Source", BF16, True),
    ("fsdp1_flat", "FSDP1Source", BF16, True),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    out = tmp_path_factory.mktemp("torch_job")
    return out, run_job("torch_job.py", out)


@pytest.mark.parametrize(("name", "kind", "dtype", "tied"), SCENARIOS)
def test_every_gathered_tensor_equals_the_unsharded_model_bit_for_bit(
    job: Job, name: str, kind: str, dtype: torch.dtype, tied: bool
) -> None:
    out, (first, second) = job
    wanted = expected(Tiny(tied), dtype, tied)
    found = load_file(out / f"{name}.safetensors")
    assert first[name]["kind"] == second[name]["kind"] == kind
    assert set(found) == set(wanted)
    for key, tensor in wanted.items():
        assert found[key].dtype == dtype
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", [row[0] for row in SCENARIOS])
def test_one_rank_sends_and_the_others_see_the_same_buckets(job: Job, name: str) -> None:
    first, second = job[1]
    assert first[name]["sender"] is True
    assert second[name]["sender"] is False
    assert first[name]["buckets"] == second[name]["buckets"] > 3


@pytest.mark.parametrize("name", [row[0] for row in SCENARIOS])
def test_metadata_is_known_before_and_equals_what_is_yielded_in_order(job: Job, name: str) -> None:
    out, (first, second) = job
    found = load_file(out / f"{name}.safetensors")
    sent = [[n, str(found[n].dtype), list(found[n].shape)] for n in first[name]["names"]]
    assert first[name]["metadata"] == second[name]["metadata"] == sent


@pytest.mark.parametrize(("name", "kind", "dtype", "tied"), SCENARIOS)
def test_what_all_ranks_hold_is_the_unsharded_model_bit_for_bit(
    job: Job, name: str, kind: str, dtype: torch.dtype, tied: bool
) -> None:
    wanted = expected(Tiny(tied), dtype, tied)
    values, counts = assembled(*job, name, wanted)
    replicas = 2 if kind == "PlainSource" or name == "hsdp" else 1
    for key, tensor in wanted.items():
        assert torch.equal(values[key], tensor), key
        first = "correction" in key  # buffers are the first rank's
        assert (counts[key] == (1 if first else replicas)).all(), key


@pytest.mark.parametrize(
    "name", ["ddp_own_buffers", "fsdp1_own_buffers", "fsdp2_own_buffers", "fsdp2_own_items"]
)
def test_of_a_plain_tensor_that_differs_between_ranks_the_first_ones_is_sent(
    job: Job, name: str
) -> None:
    wanted = expected(Tiny(), BF16)
    values, _ = assembled(*job, name, wanted)
    assert torch.equal(values["model.correction"], wanted["model.correction"])
    found = load_file(job[0] / f"{name}.safetensors")
    assert torch.equal(found["model.correction"], wanted["model.correction"])


def test_a_model_that_was_sent_before_its_first_forward_runs(job: Job) -> None:
    wanted, found = expected(Tiny(), BF16), load_file(job[0] / "fsdp1_bare_root.safetensors")
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    assert [rank["runs_first"] for rank in job[1]] == [None, None]


def test_a_model_that_was_sent_in_inference_mode_trains_on(job: Job) -> None:
    wanted, found = expected(Tiny(), BF16), load_file(job[0] / "fsdp1_inference.safetensors")
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    assert [rank["trains_on"] for rank in job[1]] == [None, None]


@pytest.mark.parametrize("name", ["fsdp1_amid", "fsdp2_amid"])
def test_between_forward_and_backward_a_model_is_sent_and_gets_the_same_gradients(
    job: Job, name: str
) -> None:
    wanted, found = expected(Tiny(), BF16), load_file(job[0] / f"{name}.safetensors")
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    for rank in job[1]:
        assert rank[f"{name}_gradients"]
        assert all(rank[f"{name}_gradients"])


def test_a_head_that_the_trainer_alone_ties_is_sent_by_itself(job: Job) -> None:
    for rank in job[1]:
        sent = rank["untied_there"]
        assert {"lm_head.weight", "model.embed_tokens.weight"} < set(sent)
        assert all(sent.values())


def test_an_error_on_one_rank_is_raised_alike_on_all(job: Job) -> None:
    first, second = (rank["raises"] for rank in job[1])
    assert first["type"] == second["type"] == "SourceFailed"
    assert first["message"] == second["message"]
    assert "rank 1" in first["message"]
    assert "tensor 2" in first["message"]
    assert "the trainer tripped" in first["message"]
    assert (first["cause"], second["cause"]) == ("NoneType", "ValueError")


def test_ranks_that_are_out_of_step_are_told_so(job: Job) -> None:
    first, second = (rank["out_of_step"] for rank in job[1])
    assert first == second
    assert first["type"] == "TransferFailed"
    assert "rank 1 is at 'seal' while rank 0 is at 'bucket 7'" in first["message"]


def test_ranks_that_pass_other_settings_or_tensors_are_told_which(job: Job) -> None:
    for rank in job[1]:
        assert rank["other_settings"]["type"] == rank["other_tensors"]["type"] == "ConfigError"
        said = rank["other_settings"]["message"]
        assert said.startswith("trainer rank 1 passes version=5, rank 0 4: ")  # in_flight is left
        said = rank["other_tensors"]["message"]
        assert said.startswith("trainer rank 1 holds lm_head.weight (bfloat16 [33, 10]) where rank")
        assert "rank 0 holds no further tensor: " in said
        assert rank["agreed"] == {}


def test_an_error_wins_over_being_out_of_step(job: Job) -> None:
    first, second = (rank["elsewhere"] for rank in job[1])
    assert first == second
    assert first == {"type": "SourceFailed", "message": "trainer rank 1, end: OSError: disk"}


def test_the_sender_is_heard_by_all_and_all_by_all(job: Job) -> None:
    for rank in job[1]:
        assert rank["broadcast"] == {"from": 0}
        assert rank["exchange"] == [{"rank": 0}, {"rank": 1}]


def test_a_rank_that_does_not_come_is_named_and_later_meetings_work(job: Job) -> None:
    first, second = (rank["absent"] for rank in job[1])
    assert first["type"] == second["type"] == "DeadlineExceeded"
    assert "rank 1 did not come" in first["message"]
    assert "rank 0 did not come" in second["message"]


def test_a_late_rank_is_named_within_the_deadline(job: Job) -> None:
    first, second = (rank["late"] for rank in job[1])
    assert first["type"] == second["type"] == "DeadlineExceeded"
    assert "rank 1 did not reach 'tensor 0'" in first["message"]
    assert first["message"] == second["message"]
    assert 2.5 < first["seconds"] < 5


def test_an_error_does_not_wait_for_ranks_that_hang_and_reaches_them_later(job: Job) -> None:
    first, second = (rank["early"] for rank in job[1])
    assert first["type"] == second["type"] == "SourceFailed"
    assert "tripped alone" in first["message"]
    assert first["message"] == second["message"]
    assert first["cause"] == "ValueError"
    assert first["seconds"] < 1.5


def test_a_report_that_comes_too_late_is_said_to_and_hides_no_reason(job: Job) -> None:
    first, second = (rank["slow_report"] for rank in job[1])
    assert first == second
    assert first["type"] == "DeadlineExceeded"
    assert "rank 1 did not reach 'digests'" in first["message"]


def test_what_the_first_rank_has_done_stays_done_where_another_is_gone(job: Job) -> None:
    assert job[1][0]["lasting"] == {"version": 7}


def test_ranks_other_than_the_first_are_told_what_is_every_ranks_own(job: Job) -> None:
    first, second = job[1]
    assert first["alone"] == [None] * 4
    for said in second["alone"]:
        assert "rank 1 of 2" in said
        assert "a version of its own" in said
    assert first["together"] == second["together"] == [None] * 4


def test_parameters_that_are_summoned_are_not_sent(job: Job) -> None:
    for rank in job[1]:
        assert "ConfigError: the module is inside FSDP's summon_full_params" in rank["summoned"]
        assert rank["no longer summoned"] is None


def test_what_an_outer_unit_has_flattened_is_refused_with_the_remedy(job: Job) -> None:
    first, second = job[1]
    said = "lies in the flat parameter of an FSDP unit around what was passed; pass the FSDP model"
    assert f"norm.weight {said}" in first["beneath"]
    assert said in f"{first['beneath all']} {second['beneath all']}"
    assert first["a unit"] is second["a unit"] is None


def test_a_source_that_is_used_twice_says_so_and_blames_no_rank(job: Job) -> None:
    for rank in job[1]:
        assert rank["used"]["type"] == "SourceFailed"
        assert "FSDP2Source has been used" in rank["used"]["message"]
        assert "make a new source" in rank["used"]["message"]


def test_a_killed_rank_is_named_at_once_on_all_others(tmp_path: Path) -> None:
    results = run_job("lost_job.py", tmp_path, world=3)
    assert results[:2] == [-9, -9]
    # Rank 1 died inside a gather, whose own error names but a socket; then the sender, at a vote.
    for when, victim in (("gather", 1), ("vote", 0)):
        lost = results[2][when]
        assert lost["type"] == "TransferFailed"
        assert f"rank {victim} is gone, at 'tensor 2'" in lost["message"]
        assert lost["seconds"] < 3
