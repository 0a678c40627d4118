"""Every example beside the demo, in its smallest form: all its processes, a few steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import async_grpo
import grpo_draft
import pytest
import torch
from addition_task import make_model, save_checkpoint, warm_up
from answering import by_token
from async_grpo import versions_of
from driver import drive, parse_arguments
from forked import Script
from grpo import Sample, make_batch
from learnt import check_learnt
from ppo_zero3 import LAMBDA, advantages

from rollout.generation import VersionSpan

EXAMPLES = Path(__file__).parents[2] / "trainer_examples"
SMALL = ("--prompts", "8", "--samples", "2", "--minibatches", "1", "--steps", "2", "--no-goals")


@pytest.fixture(autouse=True)
def _nothing_is_left_in_shared_memory() -> Iterator[None]:
    left = set(Path("/dev/shm").glob("deepspeed_*"))
    yield
    for path in set(Path("/dev/shm").glob("deepspeed_*")) - left:
        path.unlink(missing_ok=True)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs an example, in a process that has imported what most do; the summary that it prints
    last.
    """
    log = tmp_path / "log"

    def run(name: str, *arguments: str) -> dict[str, Any]:
        script = Script(EXAMPLES / name, [*arguments], log)
        try:
            script.stdin.close()
            lines = script.stdout.read().decode().splitlines()
            assert script.wait(30) == 0, [*lines, log.read_text()]
        finally:
            script.kill()
            script.close()
        summary = json.loads(lines[-1])
        assert isinstance(summary, dict)
        return summary

    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_example_that_is_told_to_end_leaves_nothing_behind(
    number: signal.Signals, tmp_path: Path
) -> None:
    with started(tmp_path) as process:
        assert process.stdout is not None
        assert any(line.startswith("step 1 ") for line in process.stdout)
        assert any((tmp_path / "scratch").glob("tmp*"))
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert not any((tmp_path / "scratch").glob("tmp*"))


def test_an_example_that_is_told_to_end_does_not_wait_for_a_service_that_starts(
    tmp_path: Path,
) -> None:
    with started(tmp_path) as process:
        end = time.monotonic() + 60
        while not any((tmp_path / "scratch").glob("tmp*/service.log")):
            assert time.monotonic() < end, "no service was started"
            time.sleep(0.01)
        time.sleep(0.2)  # the example waits for its first line by now
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not any((tmp_path / "scratch").glob("tmp*"))


@contextmanager
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The asynchronous example, for many steps, with ``scratch`` for its temporary files."""
    (tmp_path / "scratch").mkdir()
    save_checkpoint(make_model(layers=1), tmp_path / "start")
    small = ("--prompts", "8", "--samples", "2", "--minibatches", "1", "--steps", "10000")
    where = ("--start", str(tmp_path / "start"), "--output", str(tmp_path / "output"))
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "async_grpo.py"), *small, *where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "scratch")},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def check_difference(summary: dict[str, Any]) -> None:
    """Of trainer and rollout, in any sampled token's logprob: rounding, or with one's ops none."""
    largest = summary["max_logprob_diff"]
    assert largest == 0 if summary["deterministic"] else 0 < largest <= 1e-4


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        pytest.param("grpo_fsdp1.py", (), marks=pytest.mark.soak),
        ("grpo_lora.py", ()),
        ("ppo_zero3.py", ("--deterministic",)),
    ],
)
def test_two_steps_learn_and_the_service_holds_what_was_learnt(
    name: str,
    flags: tuple[str, ...],
    half_right: Path,
    tmp_path: Path,
    run: Callable[..., dict[str, Any]],
) -> None:
    if name == "ppo_zero3.py":
        pytest.importorskip("deepspeed")
    summary = run(name, *SMALL, *flags, "--start", str(half_right), "--output", str(tmp_path))
    assert (summary["version_first"], summary["version_last"]) == (0, 2)
    # That of the second step is with pushed weights: they are the trainer's, to the last sum.
    assert summary["deterministic"] == bool(flags)
    check_difference(summary)
    check_learnt(half_right, tmp_path / "checkpoint", summary)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that answers two sums of five, of all there are."""
    path: Path = tmp_path_factory.mktemp("warm") / "checkpoint"
    model = make_model(layers=1)
    warm_up(model, target=0.4, seed=0, max_steps=400)
    save_checkpoint(model, path)
    return path


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param("1", (), marks=pytest.mark.soak),
        pytest.param("2", ("--deterministic",), marks=pytest.mark.more),
    ],
)
def test_a_policy_learns_where_the_trainers_ranks_are_the_engines(
    ranks: str,
    flags: tuple[str, ...],
    warm: Path,
    tmp_path: Path,
    run: Callable[..., dict[str, Any]],
) -> None:
    where = ("--start", str(warm), "--output", str(tmp_path), "--ranks", ranks)
    size = ("--prompts", "64", "--samples", "8", "--steps", "20", "--lr", "1e-3", "--no-goals")
    summary = run("grpo_colocated.py", *where, *size, *flags)
    assert (summary["version_first"], summary["version_last"]) == (0, 20)
    assert summary["deterministic"] == bool(flags)
    check_difference(summary)
    assert summary["reward_last"] > summary["reward_first"] + 0.08
    check_learnt(warm, tmp_path / "checkpoint", summary)


@pytest.mark.more
def test_asynchronous_steps_know_which_tokens_are_older(
    half_right: Path, tmp_path: Path, run: Callable[..., dict[str, Any]]
) -> None:
    where = ("--start", str(half_right), "--output", str(tmp_path))
    summary = run("async_grpo.py", *SMALL, "--steps", "4", *where)
    assert summary["steps"] == 4
    assert summary["calls"] >= 4
    assert 0 <= summary["max_logprob_diff"] <= 1e-4  # of the tokens that are not older
    assert 0 < summary["older_tokens"] < 1
    assert summary["largest_lag"] >= 1
    check_learnt(half_right, tmp_path / "checkpoint", summary)


@pytest.mark.more
def test_a_policy_learns_the_same_whoever_drafts(
    half_right: Path, tmp_path: Path, run: Callable[..., dict[str, Any]]
) -> None:
    """A copy of this policy, which has one layer, is right until the policy moves."""
    start = ("--start", str(half_right), "--draft-calls", "0")
    runs = [
        run("grpo_draft.py", *SMALL, *start, *flags, "--output", str(tmp_path / name))
        for name, flags in (("learns", ()), ("frozen", ("--frozen-draft",)))
    ]
    for summary, name in zip(runs, ("learns", "frozen"), strict=True):
        assert (summary["version_first"], summary["version_last"]) == (1, 3)
        assert summary["right_first"] == 1.0
        assert summary["right_last"] > 0.1
        check_learnt(half_right, tmp_path / name / "checkpoint", summary)
    assert runs[0]["reward_last"] == runs[1]["reward_last"]


@pytest.mark.more
def test_written_checkpoints_become_versions(
    tmp_path: Path, run: Callable[..., dict[str, Any]]
) -> None:
    small = ("--checkpoints", "2", "--every", "1", "--layers", "1", "--no-goals")
    small += ("--replicas", "2")
    summary = run("follow_checkpoints.py", *small, "--output", str(tmp_path / "run"))
    assert summary["equal"]
    assert summary["versions"][0] == 0
    assert summary["version_last"] == 2
    first, last = (tmp_path / "run" / f"checkpoint-{step}" for step in (1, 2))
    check_learnt(first, last, {"weights_equal": summary["equal"]})


def test_one_sample_of_a_prompt_is_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from grpo_trl import parse_arguments as of_trl  # late: TRL takes seconds to import

    monkeypatch.setattr(sys, "argv", ["grpo.py", "--samples", "1"])
    for parse in (lambda: parse_arguments("", {}), of_trl):
        with pytest.raises(SystemExit) as ended:
            parse()
        assert ended.value.code == 2
        assert "--samples must be at least 2" in capsys.readouterr().err
    # The critic of PPO does without others of the same prompt.
    assert parse_arguments("", {"fewest_samples": 1}).samples == 1


@pytest.mark.parametrize(
    ("flags", "main"),
    [
        (("--replicas", "2"), lambda: drive(Path("grpo.py"), "", service=False)),
        (("--serve", "--kv-cache-dtype int8"), grpo_draft.main),
        (("--ranks", "2"), async_grpo.main),
        (("--deterministic",), async_grpo.main),
        (("--deterministic",), grpo_draft.main),
    ],
)
def test_a_flag_that_an_example_has_no_use_for_is_refused(
    flags: tuple[str, ...],
    main: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own
    output = tmp_path / "output"
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--output", str(output), *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert flags[0] in f"{ended.value.code} {capsys.readouterr().err}"
    assert not output.exists()


@pytest.mark.parametrize("drive", [lambda: drive(Path("grpo.py"), ""), async_grpo.main])
def test_an_output_that_cannot_be_made_is_said_in_a_line(
    drive: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own
    (tmp_path / "file").touch()
    where = tmp_path / "file" / "output"
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--output", str(where)])
    with pytest.raises(SystemExit) as ended:
        drive()
    assert ended.value.code == f"demo: --output {where} cannot be made: Not a directory"


def test_a_start_that_is_no_checkpoint_is_said_by_its_own_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--start", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        parse_arguments("", {})
    assert ended.value.code == 2
    assert f"--start {tmp_path / 'none'}: no checkpoint lies there" in capsys.readouterr().err


def test_the_help_of_every_example_says_what_it_shows() -> None:
    for path in sorted(EXAMPLES.glob("*.py")):
        text = path.read_text()
        if '__name__ == "__main__"' in text:
            assert f"python trainer_examples/{path.name}" in text, path.name
            assert len(text.splitlines()) < 200, path.name


def test_versions_by_token_come_from_the_spans() -> None:
    spans = [VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)]
    assert by_token(spans) == [3, 3, 4]
    samples = [
        Sample([1, 2], [5, 6, 7], [0.0] * 3, 1.0, [3, 3, 4]),
        Sample([1, 2], [5], [0.0], 0.0, [4]),
    ]
    versions = versions_of(samples, make_batch(samples, 2, pad=0))
    assert versions.tolist() == [[-1, -1, 3, 3, 4], [-1, -1, 4, -1, -1]]


def test_generalised_advantages_are_those_of_the_definition() -> None:
    samples = [
        Sample([1], [5, 6, 7], [0.0] * 3, 1.0),
        Sample([1, 2], [5], [0.0], 0.5),
    ]
    batch = make_batch(samples, 1, pad=0)
    values = torch.tensor([[9.0, 0.1, 0.2, 0.4], [9.0, 9.0, 0.3, 9.0]])
    third = 1.0 - 0.4
    second = (0.4 - 0.2) + LAMBDA * third
    first = (0.2 - 0.1) + LAMBDA * second
    wanted = [[0.0, first, second, third], [0.0, 0.0, 0.5 - 0.3, 0.0]]
    torch.testing.assert_close(advantages(batch, values, [1.0, 0.5]), torch.tensor(wanted))
