"""What each replica of ``rollout serve --replicas`` gets of the machine."""

import io
from collections import deque
from pathlib import Path

import pytest

from rollout.errors import ConfigError
from rollout.fleet.launching.engine_process import pass_on
from rollout.fleet.launching.local_launcher import (
    LocalLauncher,
    gpus_each,
    threads_each,
    visible_gpus,
)


def test_every_replica_has_gpus_of_its_own_and_sees_the_others(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-a,7,9")
    assert gpus_each(visible_gpus(), 2, 2) == [
        ["4", "5", "GPU-a", "7", "9"], ["GPU-a", "7", "4", "5", "9"],
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="3 replicas of 2 ranks need 6 GPUs, and 5 are visible"):
        gpus_each(visible_gpus(), 3, 2)


def test_processors_are_shared_out(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [threads_each(n, 1) for n in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert [threads_each(2, ranks) for ranks in (2, 4, 8)] == [2, 1, 1]


def test_every_replica_has_a_journal_of_its_own():
    """One writer forgets what is oldest, and unlinks it: of another's it might be what is open."""
    launcher = LocalLauncher(["model"], journal=Path("kept"))
    assert launcher._own_words("replica-1") == ["--journal", "kept/replica-1"]


def test_each_line_of_a_log_says_whose_it_is(capsys):
    last = deque(maxlen=1)
    pass_on("replica-1", io.StringIO("memory 64 MiB\nunfinished"), last)
    assert list(last) == ["unfinished"]
    assert capsys.readouterr().err == "replica-1: memory 64 MiB\nreplica-1: unfinished\n"
