"""Ranks on the nodes of a real Ray cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from clients.install import folder
from tiny_models import write_tiny

from rollout import Rollout

HERE = Path(__file__).parent
CLIENT = folder("verl")  # which brings Ray
NEW = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.mark.more
@pytest.mark.timeout(1200)  # others may have Ray first
@pytest.mark.usefixtures("ray_alone")
@pytest.mark.skipif(CLIENT is None, reason="Ray is not installed: make clients")
def test_an_engine_runs_over_two_nodes_and_says_when_one_is_gone(tmp_path: Path) -> None:
    models = [tmp_path / "one", tmp_path / "other"]
    expected = []
    for seed, path in enumerate(models):
        write_tiny(path, seed=seed, tokenizer=True)
        with Rollout(
            str(path), device="cpu", num_threads=1, num_kv_blocks=64, tensor_parallel_size=2
        ) as rollout:
            [output] = rollout.generate([[5, 6, 7]], NEW)
            expected.append(list(output.outputs[0].token_ids))
    path = os.pathsep.join([str(CLIENT), str(HERE.parents[1])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "ray_job.py"), *map(str, models)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "start one with 'ray start --head'" in found["no cluster"]
    assert "no room for 4 ranks with 1 CPU each" in found["no room"]
    assert "4 ranks need 1 CPU each, and the cluster holds 2 such at most" in found["never"]
    assert "2 ranks need 1 CPU and 1 GPU each, and the cluster holds 0 such" in found["no GPUs"]
    # An actor that is killed takes its ranks, and what they held, with it: the next one has room.
    assert found["of an actor"] == [expected[0]] * 2
    assert found["free"] == 2
    assert found["nodes"] == 2
    parallel = found["told"]["vllm_config"]["parallel_config"]
    assert parallel["placement_group"] == "mine"
    assert found["environment"] == [[found["instance"], "lo", None]] * 2
    assert [found["before"], found["after"], found["again"]] == [*expected, expected[0]]
    # Not by shared memory, although here the nodes are one machine's.
    assert found["from another process"] == "broadcast"
    assert "rank 1 has left" in found["died"]
    assert found["noticed"] < 15
    assert found["left"] == []
