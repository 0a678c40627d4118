"""TRL's ``AsyncGRPOTrainer``, as it is installed, over ``rollout.integrations.trl``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import write_tiny

from rollout import ConfigError, Rollout
from rollout.integrations.trl import RolloutWorker

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.more
def test_the_stock_async_trainer_trains_on_conversations_and_every_sync_arrives(
    tmp_path: Path,
) -> None:
    write_tiny(tmp_path / "tiny", "qwen3", tokenizer=True)
    done = subprocess.run(
        [sys.executable, str(HERE / "trl_async_job.py"), str(tmp_path / "tiny"), str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=270,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    got = json.loads(done.stdout.splitlines()[-1])
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
        with pytest.raises(RuntimeError, match="no reward today"):
            broken.check_health(60)
        broken.stop()
