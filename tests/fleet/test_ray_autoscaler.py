"""A fleet and an engine on a Ray cluster that a real autoscaler makes larger and smaller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from clients.install import folder
from tiny_models import write_tiny

HERE = Path(__file__).parent
CLIENT = folder("verl")  # which brings Ray


@pytest.mark.soak
@pytest.mark.timeout(1500)  # others may have Ray first
@pytest.mark.usefixtures("ray_alone")
@pytest.mark.skipif(CLIENT is None, reason="Ray is not installed: make clients")
@pytest.mark.parametrize("autoscaler", ["first", "second"])
def test_nodes_come_for_what_has_no_room_and_go_when_nothing_is_there(
    autoscaler: str, oracle, tmp_path: Path
) -> None:
    models = [tmp_path / "one", tmp_path / "other"]
    for seed, path in enumerate(models):
        write_tiny(path, seed=seed, tokenizer=True)
    job = [sys.executable, "-W", "ignore", str(HERE / "ray_autoscaler_job.py"), *map(str, models)]
    root = os.pathsep.join([str(CLIENT), str(HERE.parents[1])])
    done = subprocess.run(
        [*job, autoscaler],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    greedy = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    outputs = oracle.generate([[5, 6, 7, n] for n in range(8)], greedy)
    expected = [list(output.outputs[0].token_ids) for output in outputs]
    # An engine that has no room at first is waited with, though the nodes could not hold it.
    assert found["at first"] == 0
    assert len(found["engine"][0]) == 8
    # What the autoscaler cannot bring either is named: at once where it says so.
    kind, said = found["too many"]
    if autoscaler == "second":
        assert kind == "ConfigError"
        assert "the cluster holds 3 such at most" in said
        assert "and its autoscaler calls that infeasible; lower tensor_parallel_size" in said
    else:
        assert kind == "DeadlineExceeded"
        assert "and its autoscaler starts nodes: none now: add nodes" in said
    # A fleet: its second member comes on a new node, with the live weights, and goes with it.
    assert "it waits for Ray to find room: it asks for 1 CPU" in found["waits"]
    assert "its autoscaler starts nodes: " in found["waits"]
    assert found["two"] == 2
    assert found["joined"] == found["after"] == expected
    assert found["members"] == ["replica-0"]
    # What Ray says of its nodes is no line of the front's own.
    assert (found["status"], found["more lines"]) == (0, "")
    assert (found["none before"], found["kept"], found["actors"]) == ([], 1, [])
