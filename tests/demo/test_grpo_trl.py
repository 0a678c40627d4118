"""The example with TRL's trainer, two small steps of it, on a fleet."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.more  # `make test` has TRL's trainer in tests/frameworks
def test_trl_samples_each_step_with_the_weights_it_has_just_made() -> None:
    script = ROOT / "trainer_examples" / "grpo_trl.py"
    small = ["--steps", "2", "--layers", "1", "--prompts", "4", "--samples", "2"]
    small += ["--warmup-target", "0", "--warmup-steps", "5", "--no-goals", "--replicas", "2"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(script), *small],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=270,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["sampled_with"] == [1, 2]
    assert summary["weights_equal"]
