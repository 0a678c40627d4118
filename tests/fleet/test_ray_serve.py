"""A fleet kept running by Ray Serve, as KubeRay's RayService has it, on a real Ray cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from clients.install import folder
from tiny_models import write_tiny

from rollout.errors import ConfigError
from rollout.integrations.ray_serve import app

HERE = Path(__file__).parent
CLIENT = folder("ray_serve")


@pytest.mark.soak
@pytest.mark.timeout(1200)  # others may have Ray first
@pytest.mark.usefixtures("ray_alone")
@pytest.mark.skipif(CLIENT is None, reason="Ray Serve is not installed: make clients")
def test_the_config_in_deploy_serves_and_a_front_that_ends_is_started_again(
    oracle, tmp_path: Path
) -> None:
    write_tiny(tmp_path, seed=1, tokenizer=True)  # what the oracle has
    job = [sys.executable, "-W", "ignore", str(HERE / "ray_serve_job.py"), str(tmp_path)]
    root = os.pathsep.join([str(CLIENT), str(HERE.parents[1]), str(HERE.parent)])
    done = subprocess.run(
        job, env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = [list(oracle.generate([[5, 6, 7]], asked)[0].outputs[0].token_ids)] * 4
    assert (found["healthz"], found["tokens"], found["again"]) == (200, expected, expected)
    assert found["left"] == 0


@pytest.mark.parametrize("args", [{}, {"flet": ["MODEL"]}, {"fleet": "MODEL"}, {"fleet": []}])
def test_a_config_without_a_fleet_is_told_what_it_takes(args: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"\{fleet: \[MODEL, FLAG, ...\]\}: what follows"):
        app(args)
