"""The folder of a record that ends with its front, however that ends."""

import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollout.fleet.coordination.record import FILE
from rollout.fleet.launching.record_folder import PREFIX, record_folder

FRONT = """
from rollout.fleet.coordination.record import Record
from rollout.fleet.launching.record_folder import record_folder
with record_folder() as folder, Record(folder):
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def where(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def front():
    """A process with such a folder; ends when its standard input does."""
    with subprocess.Popen(
        [sys.executable, "-c", FRONT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_what_a_killed_front_has_left_goes_when_the_next_one_starts():
    with front() as (living, kept), front() as (killed, left):
        killed.kill()
        killed.wait()
        assert left.is_dir()
        with record_folder() as own:
            assert not left.exists()
            assert (kept / FILE).exists()
        assert not Path(own).exists()
        living.communicate("\n")
        assert not kept.exists()


def test_what_may_be_another_ones_is_left_alone(where):
    new, elsewhere = where / f"{PREFIX}new", where / "elsewhere"
    for folder in (new, elsewhere):
        folder.mkdir()
    (elsewhere / FILE).touch()
    link = where / f"{PREFIX}link"
    link.symlink_to(elsewhere)
    with record_folder():
        pass
    assert new.exists()
    assert link.exists()
    assert (elsewhere / FILE).exists()
