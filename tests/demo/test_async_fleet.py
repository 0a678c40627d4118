"""The asynchronous example on a fleet that loses a member and gets another, by its command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ("--prompts", "8", "--samples", "2", "--minibatches", "1", "--max-staleness", "0")


@pytest.mark.more
def test_steps_go_on_when_a_member_is_killed_and_one_that_is_added_serves_what_is_live(
    half_right: Path, tmp_path: Path
) -> None:
    """That no token is of a version which the trainer has not made, the example sees to."""
    command = [sys.executable, str(BENCHMARKS / "async_fleet.py"), "--start", str(half_right)]
    command += ["--steps", "40", "--kill-after", "5", "--add-after", "10", "--faults-alone"]
    command += ["--picture", str(tmp_path / "curve.png"), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = map(json.loads, done.stdout.splitlines())
    assert found["steps"] == 40
    assert 5 <= found["killed_after_step"] <= found["missed_after_step"]
    assert found["missed_after_step"] <= found["added_after_step"] <= 40
    assert found["version"] == found["added_version"] == 40
    assert found["weights_equal"]
    assert found["added_equal"]
    assert found["added_tokens"] > 0
    assert sum(found["tokens_by_age"].values()) > 0
    assert found["stale_samples"].get("recomputed", 0) == found["mixed_samples"]
    assert 0 <= found["max_logprob_diff"] <= 1e-4
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
