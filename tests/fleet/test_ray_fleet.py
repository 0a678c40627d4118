"""A fleet on the nodes of a real Ray cluster."""

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


@pytest.mark.more
@pytest.mark.timeout(1200)  # others may have Ray first
@pytest.mark.usefixtures("ray_alone")
@pytest.mark.skipif(CLIENT is None, reason="Ray is not installed: make clients")
def test_members_move_when_nodes_go_and_the_fleet_serves_on(
    checkpoint, oracle, tmp_path: Path
) -> None:
    """With a notice and without one; what has no place any more is named, and waits for one."""
    write_tiny(tmp_path, seed=1, tokenizer=True)  # what the oracle has
    job = [sys.executable, "-W", "ignore", str(HERE / "ray_fleet_job.py")]
    root = os.pathsep.join([str(CLIENT), str(HERE.parents[1])])
    done = subprocess.run(
        [*job, checkpoint, str(tmp_path), str(tmp_path / "record")],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    status, said = found["no room"]
    assert status == 2
    assert "it asks for 2 CPU on one node; the cluster's 3 nodes have 2 CPU" in said
    assert "--executor ray" in said
    assert "r would never start: it waits for Ray to find room" in found["never"]
    assert found["nodes"] == 2
    assert found["both"]["members"] == {"replica-0": "committed", "replica-1": "committed"}
    greedy = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = list(oracle.generate([[5, 6, 7]], greedy)[0].outputs[0].token_ids)
    assert found["after"] == found["without"] == [expected] * 4
    prompts = [[5, 6, 7, n] for n in range(8)]
    outputs = oracle.generate(prompts, greedy)
    assert found["joined"] == [list(output.outputs[0].token_ids) for output in outputs]
    assert found["drained"]
    assert found["moved"]
    assert "it waits for Ray to find room: it asks for 1 CPU" in found["waits"]["replica-0"]
    assert "Ray has lost its actor" in found["gone"]
    assert found["pending"] == [{"CPU": 1.0}]
    assert found["one"].pop("replica-2") == "committed"
    assert "took no part: Ray has lost its actor" in found["one"].pop("replica-0")
    assert found["one"] == {"replica-1": "left"}
    assert found["fewer"]["count"] == 1
    assert found["members"] == ["replica-2"]
    assert found["left"] != [expected]
    assert (found["status"], found["groups"]) == (0, [])
    assert found["same engines"] == [1, True]
    assert found["kept"] == [expected]
    assert "run still, and were started with other words" in found["other words"]
    assert found["ended"] == [0, [], []]
