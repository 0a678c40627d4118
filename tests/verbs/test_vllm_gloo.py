"""A place in a foreign gloo group, before and after its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from serving import alive
from shared_engines import eventually

from rollout.errors import TransferFailed
from rollout.weight_sync.transports.foreign_gloo import GlooMember
from rollout.weight_sync.transports.foreign_group import ForeignGroup


def test_a_place_that_was_left_touches_no_file_that_came_after_it(tmp_path) -> None:
    member = GlooMember(ForeignGroup(host="127.0.0.1", port=1, rank_offset=1, size=2), 1)
    member.close()
    path = tmp_path / "another"
    path.write_bytes(bytes(100))
    files = [path.open("r+b") for _ in range(8)]  # one gets the descriptor that is free again
    try:
        assert member._memory in [file.fileno() for file in files]
        with pytest.raises(TransferFailed, match="the group was left"):
            member.receive(1000, 1.0)
        assert os.path.getsize(path) == 100
    finally:
        for file in files:
            file.close()


ORPHAN = """
import os, time
from rollout.weight_sync.transports.foreign_gloo import GlooMember
from rollout.weight_sync.transports.foreign_group import START_LIMIT, ForeignGroup

member = GlooMember(ForeignGroup(host="127.0.0.1", port=1, rank_offset=1, size=2), 1)
member._start()
member._answer(START_LIMIT, "the start")
child = os.fork()
if child:
    print(member._process.pid, child, flush=True)
time.sleep(60)
os._exit(0)
"""


def test_its_process_ends_with_a_killed_engine_whose_forked_processes_go_on() -> None:
    command = [sys.executable, "-W", "ignore", "-c", ORPHAN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process, child = map(int, parent.stdout.readline().split())
        try:
            parent.kill()
            eventually(lambda: not alive(process), 10)
            assert alive(child)
        finally:
            os.kill(child, signal.SIGKILL)
