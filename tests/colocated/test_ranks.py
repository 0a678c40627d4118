"""A trainer's own processes as the engine's ranks: FSDP2 and tensor parallel over the same two."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from serving import alive
from tiny_models import write_tiny
from trainer_processes import Job

from rollout import ConfigError, EngineClosed, InvalidRequest, Rollout, SamplingParams
from rollout.api.colocated.rank_sources import Drained

SCRIPT = Path(__file__).with_name("ranks_job.py")
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [5, 6, 7, 8, 12]]
SAMPLED = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two checkpoints of one shape."""
    made = [tmp_path_factory.mktemp(f"weights{seed}") for seed in (0, 1)]
    for seed, path in enumerate(made):
        write_tiny(path, seed=seed, tokenizer=True)
    return str(made[0]), str(made[1])


@pytest.fixture
def job(paths: tuple[str, str], tmp_path: Path) -> Iterator[Job]:
    made = Job(SCRIPT, 2, tmp_path / "log", paths[0])
    try:
        made.answers(120)
        yield made
    finally:
        made.close()


def same(job: Job, op: str, **command: Any) -> Any:
    """What every rank answered, which must be the same."""
    first, second = job.ask(op=op, **command)
    assert first is not None, job.log.read_text()[-3000:]
    assert second is not None, job.log.read_text()[-3000:]
    assert first.get("error") == second.get("error"), (first, second)
    if "error" in first:
        assert first["message"] == second["message"]
        return first
    assert first["done"] == second["done"]
    return first["done"]


@pytest.mark.parametrize("stages", [1, 2])
def test_an_update_of_the_ranks_own_shards_equals_a_fresh_start_and_a_failed_one_changes_nothing(
    job: Job, paths: tuple[str, str], stages: int
) -> None:
    old, new = paths
    refused = same(job, "start_otherwise", path=old)
    assert refused["error"] == "ConfigError"
    assert "max_model_len" in refused["message"]
    same(job, "start", path=old, pipeline_parallel_size=stages)
    before = same(job, "generate", prompts=PROMPTS, **SAMPLED)
    with Rollout(old, device="cpu", num_threads=1, num_kv_blocks=64) as alone:
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        told = [output.outputs[0].token_ids for output in alone.generate(PROMPTS, greedy)]
    found = same(job, "generate", prompts=PROMPTS, temperature=0.0, max_tokens=12, ignore_eos=True)
    assert [row[0] for row in found] == told

    vectors = same(job, "embed", prompts=PROMPTS, pooling="mean", dimensions=8)
    assert [len(vector) for vector in vectors] == [8] * len(PROMPTS)

    differ = same(job, "generate", prompts=PROMPTS, by_rank=True)
    assert differ["error"] == "InvalidRequest"
    assert "other arguments" in differ["message"]

    same(job, "load", path=new)
    short = same(job, "update_short")
    assert short["error"] in ("IncompleteUpdate", "WeightMismatch")
    assert same(job, "generate", prompts=PROMPTS, **SAMPLED) == before

    receipt = same(job, "update")
    assert (receipt["version"], receipt["transport"]) == (1, "p2p")
    assert same(job, "equal")
    after = same(job, "generate", prompts=PROMPTS, **SAMPLED)
    assert after != before
    gathered = same(job, "update_gathered")
    assert gathered["digest"] == receipt["digest"]

    # Memory goes to the trainer and comes back; the weights by an update where they were dropped.
    same(job, "sleep", level=1)
    assert same(job, "generate", prompts=PROMPTS, **SAMPLED)["error"] == "EngineClosed"
    same(job, "wake")
    same(job, "sleep", level=2)
    same(job, "wake", tags=["weights"])
    same(job, "update")
    same(job, "wake", tags=["kv_cache"])
    slept = same(job, "generate", prompts=PROMPTS, **SAMPLED)
    assert [row[:3] for row in slept] == [row[:3] for row in after]

    nan = same(job, "update_nan")
    assert "NaN" in nan["message"]
    assert same(job, "version") == 3
    kept = same(job, "generate", prompts=PROMPTS, **SAMPLED)
    assert kept == slept
    same(job, "stop")

    same(job, "start", path=new, pipeline_parallel_size=stages)
    fresh = same(job, "generate", prompts=PROMPTS, **SAMPLED)
    assert [row[:3] for row in fresh] == [row[:3] for row in after]  # bit for bit
    parted = same(job, "part")
    assert parted["error"] == "WorkerDied"
    assert "'sleep'" in parted["message"]
    assert same(job, "generate", prompts=PROMPTS, **SAMPLED) == fresh  # they meet again
    same(job, "stop")


def test_a_source_that_fails_on_one_rank_fails_on_all_and_nothing_goes_live(
    job: Job, paths: tuple[str, str]
) -> None:
    same(job, "start", path=paths[0])
    same(job, "load", path=paths[1])
    for rank in (1, 0):
        failed = same(job, "update_raising", by=rank)
        assert (failed["error"], "tripped" in failed["message"]) == ("SourceFailed", True)
        assert same(job, "version") == 0
    without = same(job, "update_without")
    assert without["error"] == "ConfigError"
    assert "trainer rank 1: NoneType is not a weight source" in without["message"]
    otherwise = same(job, "update_otherwise")
    assert otherwise["error"] == "InvalidRequest"
    assert "rank 1 passed whole weights to update_weights, rank 0 what" in otherwise["message"]
    assert same(job, "update_gathered")["version"] == 1
    assert same(job, "equal")
    same(job, "stop")


def test_a_generator_that_an_update_left_early_is_read_to_its_end() -> None:
    """A trainer's own gathers, which the other ranks go on with (without DTensors: ZeRO's)."""
    gathered = []

    def items() -> Iterator[Any]:
        for number in range(4):
            gathered.append(number)
            yield f"{number}", torch.zeros(1)

    drained = Drained(items())
    for _ in drained:
        break  # as where the first name is refused
    assert drained.drain() is None
    assert gathered == [0, 1, 2, 3]


@pytest.mark.more
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_an_error_on_the_others_at_once(
    job: Job, paths: tuple[str, str], rank: int
) -> None:
    """Also where processes that it has forked go on."""
    same(job, "start", path=paths[0])
    children = [answer["done"] for answer in job.ask(op="go_on") if answer is not None]
    try:
        answers = job.ask(op="die", prompts=PROMPTS * 20, rank=rank)
        assert answers[rank] is None
        other = answers[1 - rank]
        assert other is not None
        assert other["error"] == "WorkerDied"
        assert other["seconds"] < 10
        assert all(alive(child) for child in children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_child_that_a_rank_forks_ends_nothing_of_its_engine(
    job: Job, paths: tuple[str, str]
) -> None:
    same(job, "start", path=paths[0])
    assert same(job, "fork", verb="version") == 7
    assert same(job, "fork", verb="generate", prompts=PROMPTS) == 7
    assert same(job, "fork", verb="stop") == 0
    assert len(same(job, "generate", prompts=PROMPTS, max_tokens=2)) == len(PROMPTS)
    same(job, "stop")


def test_one_process_alone_is_an_engine_of_one_rank(paths: tuple[str, str]) -> None:
    with Rollout.from_ranks(paths[0], device="cpu", num_threads=1, num_kv_blocks=64) as colocated:
        [output] = colocated.generate([PROMPTS[0]], SAMPLED)
        assert len(output.outputs[0].token_ids) == 12
        receipt = colocated.update_weights(paths[1])
        assert receipt.version == colocated.weight_version == 1
        assert colocated.check_weights(paths[1]).equal
        with pytest.raises(InvalidRequest, match="no score head"):
            colocated.classify([PROMPTS[0]])
    with pytest.raises(ConfigError, match="the group has 1 ranks"):
        Rollout.from_ranks(paths[0], tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"Rollout\.from_ranks"):
        Rollout(paths[0], executor="external")


def test_what_a_rank_passes_wrongly_is_named(paths: tuple[str, str]) -> None:
    settings: dict[str, Any] = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64}
    for seconds in (None, "x", -1, float("nan")):
        with pytest.raises(ConfigError, match="meet_timeout must be a number of seconds"):
            Rollout.from_ranks(paths[0], meet_timeout=seconds, **settings)  # type: ignore[arg-type]
    with Rollout.from_ranks(paths[0], **settings) as colocated:
        given: Any = colocated  # of wrong types, on purpose
        for verb, words in (
            (lambda: given.generate([1, 2], timeout="x"), "timeout must be a number of seconds"),
            (lambda: given.generate([1, 2], max_tokens=1), "generate takes no 'max_tokens'"),
            (lambda: given.rollback(None), "timeout must be a number of seconds"),
            (lambda: given.sleep(1, timeout=[]), "timeout must be a number of seconds"),
            (lambda: given.wake_up(timeout=0), "timeout must be a number of seconds"),
            (lambda: given.embed([1, 2], normalize="no"), "normalize must be True or False"),
            (lambda: given.embed([1, 2], dimensions=True), "dimensions must be 1 or more"),
            (lambda: given.score(None), "prompts must be a list"),
            (lambda: given.score([[1, 2], 3]), "prompt 1 is neither"),
            (lambda: given.score(["a b"]), "score takes lists of token ids"),
            (lambda: given.score([{"prompt_token_ids": [1, 2]}]), "score takes lists of token ids"),
            (lambda: given.reset_prefix_cache(now=True), "reset_prefix_cache takes no 'now'"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                verb()
        assert colocated.generate([PROMPTS[0]], SAMPLED)[0].finished
    with pytest.raises(EngineClosed, match="was shut down"), colocated:
        pass


@pytest.mark.parametrize("group", ["x", 1, {}, [0]])
def test_a_group_that_is_none_is_named(paths: tuple[str, str], tmp_path: Path, group: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r"group must be one of torch\.distributed"):
            Rollout.from_ranks(paths[0], group, device="cpu")
        with Rollout.from_ranks(
            paths[0], dist.group.WORLD, device="cpu", num_threads=1, num_kv_blocks=64
        ) as colocated:
            assert colocated.generate([PROMPTS[0]], SAMPLED)[0].finished
    finally:
        dist.destroy_process_group()


def test_a_reward_model_on_the_ranks_gives_its_rewards(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, labels=1, tokenizer=True)
    with Rollout.from_ranks(
        str(tmp_path), device="cpu", num_threads=1, num_kv_blocks=64, task="reward"
    ) as judge:
        for given in (PROMPTS[:2], [{"role": "user", "content": "Hello"}]):
            for output in judge.classify(given):
                with torch.no_grad():
                    logits = model(torch.tensor([output.prompt_token_ids])).logits[0]
                assert output.reward == pytest.approx(float(logits[0]), abs=1e-4)
        [each] = judge.classify(PROMPTS[:1], pooling="all")
        assert each.logits.shape == (len(PROMPTS[0]), 1)
