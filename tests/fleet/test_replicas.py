"""What each replica of ``rollout serve --replicas`` gets of the machine."""

import io
from pathlib import Path

import pytest

from rollout.errors import ConfigError
from rollout.fleet.replicas import Replicas, gpus_each, pass_on, threads_each, visible_gpus


def test_every_replica_has_gpus_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-a,7,9")
    assert gpus_each(visible_gpus(), 2, 2) == [["4", "5"], ["GPU-a", "7"]]
    with pytest.raises(ConfigError, match="3 replicas of 2 ranks need 6 GPUs, and 5 are visible"):
        gpus_each(visible_gpus(), 3, 2)


def test_processors_are_shared_out(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [threads_each(n) for n in (1, 2, 3, 16)] == [8, 4, 2, 1]


def test_every_replica_has_a_journal_of_its_own():
    """One writer forgets what is oldest, and unlinks it: of another's it might be what is open."""
    replicas = Replicas(None, "model", ["--journal", "kept"], 2, journal=Path("kept"))
    assert replicas._own_flags("replica-1") == ["--journal", "kept/replica-1"]


def test_each_line_of_a_log_says_whose_it_is(capsys):
    pass_on("replica-1", io.StringIO("memory 64 MiB\nunfinished"))
    assert capsys.readouterr().err == "replica-1: memory 64 MiB\nreplica-1: unfinished\n"
