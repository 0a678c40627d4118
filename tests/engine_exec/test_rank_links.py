"""The engine's end of a rank's socket, without the rank."""

from __future__ import annotations

import fcntl
import resource
import socket

import pytest

from rollout.engine.executors.rank_link import _Outbox


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this process may not have so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_frame_longer_than_the_socket_takes_goes_out_whatever_the_descriptor(many_files) -> None:
    """``select`` knows none above 1023, which a process with many open files has."""
    ours, theirs = socket.socketpair()
    high = socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, 1500))
    frame = bytes(range(256)) * (1 << 15)
    with ours, theirs, high:
        outbox = _Outbox(high, "rollout-writer-test")
        outbox.put([frame])
        got = bytearray()
        theirs.settimeout(60)
        while len(got) < len(frame):
            got += theirs.recv(1 << 20)
        assert got == frame
        outbox.close()
        outbox.join()
