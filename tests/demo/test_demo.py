"""The demo itself in its smallest form: all its processes, three steps."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from learnt import check_learnt
from serving import alive, descendants

from rollout import Rollout, SamplingParams

EXAMPLES = Path(__file__).parents[2] / "trainer_examples"
SMALL = ("--prompts", "8", "--samples", "2", "--minibatches", "1", "--layers", "1", "--no-goals")


def test_three_steps_learn_and_the_service_holds_what_was_learnt(
    half_right: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [*command(tmp_path), "--start", str(half_right), "--steps", "3"],
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["version_first"], summary["version_last"]) == (3, 0, 3)
    # Of three samplings, two with weights that were pushed: none is further from the trainer.
    assert 0 < summary["max_logprob_diff"] <= 1e-4
    check_learnt(half_right, tmp_path / "checkpoint", summary)
    assert set(summary) >= {"reward_first", "reward_last", "seconds"}
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    with Rollout(str(tmp_path / "checkpoint"), device="cpu", num_threads=1) as engine:
        output = engine.generate("12+34=", SamplingParams(max_tokens=4, temperature=0.0))[0]
    assert len(output.prompt_token_ids) == 6
    assert output.outputs[0].token_ids


@pytest.mark.more
def test_the_same_demo_trains_on_a_fleet(half_right: Path, tmp_path: Path) -> None:
    """As `make demo REPLICAS=2` starts it."""
    rules = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo", "REPLICAS=2"],
        cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    [line] = [line for line in rules.splitlines() if "grpo_fsdp2.py" in line]
    flags = line.split()[2:]
    assert flags == ["--replicas", "2"]
    done = subprocess.run(
        [*command(tmp_path), *flags, "--start", str(half_right), "--steps", "2"],
        capture_output=True, text=True, timeout=270, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["version_first"], summary["version_last"]) == (2, 0, 2)
    assert summary["max_logprob_diff"] <= 1e-4
    check_learnt(half_right, tmp_path / "checkpoint", summary)


@pytest.mark.more
def test_nothing_outlives_a_demo_that_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*command(tmp_path), "--warmup-steps", "5", "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert any(line.startswith("step 1 ") for line in process.stdout)
        children = descendants(process.pid)
        assert len(children) >= 5  # the service, its two ranks, two trainer ranks
    finally:
        process.kill()
        process.communicate()
    end = time.monotonic() + 60
    while left := sorted(filter(alive, children)):
        assert time.monotonic() < end, f"still running: {left}"
        time.sleep(0.1)


def command(output: Path) -> list[str]:
    return [sys.executable, str(EXAMPLES / "grpo_fsdp2.py"), *SMALL, "--output", str(output)]
