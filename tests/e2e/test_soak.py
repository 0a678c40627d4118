"""A short course of the soak: updates, faults and streams at once, and everything stays true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 40  # of which each event happens at least once; `make soak` takes ten times as many


@pytest.mark.more
def test_updates_faults_and_streams_for_a_while() -> None:
    roots = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--seconds", str(SECONDS),
         "--clients", "8", "--seed", "1"],
        capture_output=True, text=True, timeout=270, check=False,
        env={**os.environ, "PYTHONPATH": roots, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["violations"] == 0
    assert said["updates"] >= 10
    assert said["faults"] >= 5
    assert said["tokens_checked"] >= 500
    assert said["tokens_checked_of_mixed_kv"] > 0
    assert said["checks"] >= said["updates"]
    assert said["sleeps"] >= 1
    assert said["restarts"] >= 1
    assert len(said["by_transport"]) >= 3
