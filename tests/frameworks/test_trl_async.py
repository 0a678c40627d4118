"""TRL's ``AsyncGRPOTrainer``, as it is installed, over ``rollout.integrations.trl``."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import httpx
import pytest
from frameworks.jobs import run
from serving import serve
from tiny_models import write_tiny

from rollout import ConfigError, Rollout
from rollout.integrations.trl import RolloutWorker


@pytest.mark.more
def test_the_stock_async_trainer_trains_on_conversations_and_every_sync_arrives(
    tmp_path: Path,
) -> None:
    write_tiny(tmp_path / "tiny", "qwen3", tokenizer=True)
    got = run("trl_async_job.py", tmp_path / "tiny", tmp_path)[-1]
    assert [sync["equal"] for sync in got["syncs"]] == [True] * 4  # one before the first step
    assert [sync["version"] for sync in got["syncs"]] == [1, 2, 3, 4]
    assert len({sync["norm"] for sync in got["syncs"]}) == 4  # every step changed the weights
    assert len(got["rows"]) == 3
    # Every token that was sampled, by the weights of its own version as transformers runs them.
    assert got["tokens"] >= 3 * 8
    assert len(got["versions"]) >= 2
    assert 0 < got["largest"] < 1e-4


def test_a_worker_scores_groups_and_says_what_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # else importing it is a warning
    write_tiny(tmp_path, "qwen3", tokenizer=True)
    rows = [{"prompt": "Hello", "answer": "x"}]

    def lengths(prompts, completions, completion_ids, answer):
        assert prompts == ["Hello"] * 2
        assert answer == ["x"] * 2
        assert all(isinstance(text, str) for text in completions)
        return [float(index) for index, _ in enumerate(completion_ids)]

    def breaks(**_):
        raise ValueError("no reward today")

    with Rollout(str(tmp_path), device="cpu", num_threads=1, num_kv_blocks=64) as rollout:
        with pytest.raises(ConfigError, match="num_generations"):
            RolloutWorker(rollout, rows, lengths, num_generations=1)
        settings = {"params": {"max_tokens": 4}, "num_generations": 2, "queue_size": 4}
        worker = RolloutWorker(rollout, rows, lengths, max_inflight=2, **settings)
        worker.update_model_version(1)
        worker.start()
        end = time.monotonic() + 60
        while worker.rollout_buffer.qsize() < 2 and time.monotonic() < end:
            worker.check_health(60)
            time.sleep(0.02)
        first, second = (worker.rollout_buffer.get(timeout=1) for _ in range(2))
        worker.stop()
        assert first.group_id == second.group_id == 0
        assert (first.advantage, second.advantage) == pytest.approx((-1, 1), abs=1e-5)
        assert first.model_version == 1  # the trainer's number of the engine's version 0
        assert first.completion_mask.sum() == 4
        assert first.input_ids.shape == first.old_log_probs.shape
        assert first.metrics["rewards/lengths"] == 0.0
        broken = RolloutWorker(rollout, rows, breaks, max_inflight=2, **settings)
        broken.start()
        end = time.monotonic() + 60
        while broken.failure is None and time.monotonic() < end:
            time.sleep(0.02)
        with pytest.raises(RuntimeError, match="ValueError: no reward today"):
            broken.check_health(60)
        broken.stop()


@pytest.mark.parametrize(
    ("dataset", "rewards", "words"),
    [
        ([], len, "the dataset is empty"),
        ([{"prompt": "Hello"}], [], "reward_funcs is empty"),
        ([{"question": "Hello"}], len, r'row 0 of the dataset \(question\) has no "prompt"'),
        (["Hello"], len, r'row 0 of the dataset \(str\) has no "prompt"'),
    ],
)
def test_a_worker_that_has_nothing_to_work_on_is_refused_at_once(dataset, rewards, words) -> None:
    with pytest.raises(ConfigError, match=words):
        RolloutWorker(None, dataset, rewards)


def test_a_later_row_without_a_prompt_and_an_infinite_reward_end_a_worker_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    write_tiny(tmp_path, "qwen3", tokenizer=True)

    def failure(values: list[float]) -> BaseException | None:
        def odds(**_):
            return values

        worker = RolloutWorker(
            rollout, [{"prompt": "Hello"}, {"text": "Hello"}], odds, params={"max_tokens": 4},
            num_generations=2, max_inflight=2,
        )  # fmt: skip
        worker.start()
        end = time.monotonic() + 60
        while worker.failure is None and time.monotonic() < end:
            time.sleep(0.02)
        worker.stop()
        return worker.failure

    with Rollout(str(tmp_path), device="cpu", num_threads=1, num_kv_blocks=64) as rollout:
        for values, words in (
            ([0.0, 1.0], 'row 1 of the dataset (text) has no "prompt"'),
            ([0.0, float("nan")], 'row 1 of the dataset (text) has no "prompt"'),  # as None
            ([0.0, float("-inf")], "the reward function odds gave [0.0, -inf]"),
            ([0.0], "the reward function odds gave 1 values for 2"),
        ):
            ended = failure(values)
            assert isinstance(ended, ConfigError)
            assert words in str(ended)


def test_reward_functions_are_called_as_trl_calls_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a row has of a sample's own is left out, and what is async is awaited, on one loop."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    write_tiny(tmp_path, "qwen3", tokenizer=True)
    row = {"prompt": "Hello", "completion": "there", "completion_ids": [1, 2], "answer": "x"}
    seen, loops, begun, cancelled = [], set(), threading.Event(), threading.Event()

    def plain(completions, completion_ids, **columns):
        seen.append((len(completions), len(completion_ids), columns))
        return [0.0, 1.0]

    class Judge:
        async def __call__(self, completions, **_):
            await asyncio.sleep(0)
            loops.add(asyncio.get_running_loop())
            return [3.0, None]

    async def endless(**_):
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    with Rollout(str(tmp_path), device="cpu", num_threads=1, num_kv_blocks=64) as rollout:
        settings = {"params": {"max_tokens": 4}, "num_generations": 2, "max_inflight": 2}
        worker = RolloutWorker(rollout, [row], [plain, Judge()], **settings)
        worker.start()
        got = [worker.rollout_buffer.get(timeout=60) for _ in range(4)]
        worker.stop()
        worker.check_health(60)
        waits = RolloutWorker(rollout, [row], endless, **settings)
        monkeypatch.setattr("rollout.integrations.trl._END_WAIT", 2.0)
        waits.start()
        assert begun.wait(60)
        waits.stop()
    assert seen[0] == (2, 2, {"prompts": ["Hello"] * 2, "answer": ["x"] * 2})
    assert [sample.metrics["reward"] for sample in got] == [3.0, 1.0] * 2
    assert got[0].metrics["rewards/Judge"] == 3.0
    assert len(loops) == 1
    assert not any(loop.is_running() for loop in loops)
    assert cancelled.wait(60)


def test_what_was_cut_short_is_neither_scored_nor_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    write_tiny(tmp_path, "qwen3", tokenizer=True)
    whole = threading.Semaphore(0)

    def play(session, row, params):
        if params.seed % 3:
            session.generate(row["prompt"], params)
            whole.release()
            return
        assert all(whole.acquire(timeout=60) for _ in range(2))  # the others are not to be aborted
        long = {"max_tokens": 480, "ignore_eos": True}
        cut = threading.Thread(target=session.generate, args=(row["prompt"], long))
        cut.start()
        while cut.is_alive():
            rollout.abort()
            cut.join(0.01)

    def lengths(prompts, completions, completion_ids):
        assert len(prompts) == 2
        return [0.0, 1.0]

    with Rollout(str(tmp_path), device="cpu", num_threads=1, num_kv_blocks=64) as rollout:
        worker = RolloutWorker(
            rollout, [{"prompt": "Hello"}], lengths, params={"max_tokens": 4}, play=play,
            num_generations=3, max_inflight=3, queue_size=2,
        )  # fmt: skip
        worker.start()
        samples = [worker.rollout_buffer.get(timeout=60) for _ in range(2)]
        worker.stop()
        worker.check_health(60)
    assert worker.dropped >= 1
    assert [sample.completion_mask.sum() for sample in samples] == [4, 4]
    assert [sample.advantage for sample in samples] == pytest.approx([-1, 1], abs=1e-5)


def test_a_worker_whose_conversations_all_come_to_nothing_is_not_healthy(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3", tokenizer=True)

    def cut_short(session, row, params):
        long = {"max_tokens": 480, "ignore_eos": True}
        cut = threading.Thread(target=session.generate, args=(row["prompt"], long))
        cut.start()
        while cut.is_alive():
            rollout.abort()
            cut.join(0.01)

    def never_asked(**_):
        raise AssertionError("there is nothing to score")

    def unhealthy(play) -> RolloutWorker:
        worker = RolloutWorker(
            rollout, [{"prompt": "Hello"}], never_asked, play=play,
            num_generations=2, max_inflight=2,
        )  # fmt: skip
        worker.start()
        end = time.monotonic() + 60
        while worker.dropped < 2 and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.5)
        with pytest.raises(RuntimeError, match=r"no group of samples.*\d conversations"):
            worker.check_health(0.4)
        worker.stop()
        return worker

    with Rollout(str(tmp_path), device="cpu", num_threads=1, num_kv_blocks=64) as rollout:
        for play in (lambda *_: time.sleep(0.01), cut_short):
            worker = unhealthy(play)
            assert worker.failure is None
            assert worker.dropped >= 2
            assert worker.dropped % 2 == 0
            assert worker.rollout_buffer.empty()


@pytest.mark.more
def test_the_stock_async_trainer_sends_adapters_which_are_merged_as_they_are_loaded(
    tmp_path: Path,
) -> None:
    model, scratch = tmp_path / "tiny", tmp_path / "out"
    write_tiny(model, "qwen3", tokenizer=True)
    scratch.mkdir()
    flags = ["--dtype", "float32", "--weight-dir", str(scratch), "--tensor-parallel-size", "2"]
    with serve(model, *flags) as served:
        url = f"http://{served.http}"
        got = run("trl_lora_job.py", model, url, served.grpc, scratch)[-1]
        syncs = got["syncs"]
        assert [sync["version"] for sync in syncs] == [1, 2, 3, 4]
        assert [sync["label"] for sync in syncs] == [f"trl-policy-v{n}" for n in (1, 2, 3, 4)]
        assert all(sync["equal"] and sync["named"] for sync in syncs)
        assert len({sync["norm"] for sync in syncs}) == 4
        assert len(got["ratios"]) == 3
        assert "trl-policy-v4" in syncs[3]["names"]
        assert "trl-policy-v1" not in syncs[3]["names"]  # TRL has unloaded what was stale

        def post(path: str, **body: object) -> tuple[int, str]:
            answer = httpx.post(f"{url}{path}", json=body, timeout=60)
            return answer.status_code, answer.text

        status, text = post("/v1/load_lora_adapter", lora_name="x", lora_path=str(tmp_path))
        assert (status, "--weight-dir" in text) == (400, True)
        (scratch / "empty").mkdir()
        status, text = post(
            "/v1/load_lora_adapter", lora_name="x", lora_path=str(scratch / "empty")
        )
        assert (status, "adapter_config.json" in text) == (400, True)
        assert post("/v1/unload_lora_adapter", lora_name="x")[0] == 404
        with Rollout.connect(served.grpc) as rollout:
            assert rollout.weight_version == 4  # nothing of that changed anything
            # Without its adapter the service is the checkpoint again, as a new version.
            assert post("/v1/unload_lora_adapter", lora_name="trl-policy-v4")[0] == 200
            assert rollout.weight_version == 5
            assert rollout.check_weights(str(model)).equal


@pytest.mark.more
def test_the_stock_async_trainer_sends_adapters_which_a_fleet_serves_beside_the_weights(
    tmp_path: Path,
) -> None:
    model, scratch = tmp_path / "tiny", tmp_path / "out"
    write_tiny(model, "qwen3", tokenizer=True)
    scratch.mkdir()
    flags = ["--dtype", "float32", "--weight-dir", str(scratch), "--replicas", "2"]
    with serve(model, *flags, "--max-adapters", "4") as served:
        url = f"http://{served.http}"
        syncs = run("trl_lora_job.py", model, url, served.grpc, scratch)[-1]["syncs"]
        # TRL unloads the first policy before it loads the fourth: of a fleet that is a commit, too.
        assert [sync["version"] for sync in syncs] == [1, 2, 3, 5]
        names = [f"trl-policy-v{n}@{version}" for n, version in enumerate((1, 2, 3, 5), 1)]
        assert [sync["adapter"] for sync in syncs] == names
        assert all(sync["named"] for sync in syncs)
        assert "trl-policy-v1" not in syncs[3]["names"]  # TRL has unloaded what was stale
        with Rollout.connect(served.grpc) as rollout:
            assert rollout.check_weights(str(model)).equal  # the base has never changed
            assert rollout.weight_info().adapters["trl-policy-v4"] == 5
            for receipt in rollout.receipts():
                members = {"replica-0": "committed", "replica-1": "committed"}
                assert receipt.details["members"] == members
