"""Collectives through shared memory: real processes, against a plain sum."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from engine_exec.drive_executor import generate, running

import rollout
from rollout.distributed import RendezvousServer
from rollout.engine.worker.shared_memory_group import create_shared
from rollout.kernels import native
from rollout.wire.codec import to_plain

RANK = Path(__file__).with_name("collective_rank.py")

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="no compiler"),
    pytest.mark.usefixtures("nothing_left_here"),
]


def run_ranks(case, size):
    """Every rank's exit code and what it printed."""
    fd = create_shared(size)
    assert fd is not None
    server = RendezvousServer(size, "gloo")
    where = json.dumps(to_plain(server.info))
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(rollout.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), case, str(fd), str(rank), str(size), where],
            pass_fds=(fd,),
            stdout=subprocess.PIPE,
            env=env,
        )
        for rank in range(size)
    ]
    os.close(fd)
    try:
        told = [rank.communicate(timeout=270)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        server.close()
    codes = [rank.returncode for rank in ranks]
    return list(zip(codes, [json.loads(text or "null") for text in told], strict=True))


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.more) for n in (3, 4))])
def test_sums_and_gathers_equal_the_reference_and_have_the_same_bits_everywhere(size):
    results = run_ranks("conformance", size)
    assert [code for code, _ in results] == [0] * size
    assert all(told == results[0][1] for _, told in results)


def test_a_killed_rank_is_named_at_the_deadline_and_nobody_spins_until_then():
    *rest, (code, _) = run_ranks("killed", 3)
    assert code == -signal.SIGKILL
    for code, told in rest:
        assert code == 0
        assert len(told["errors"]) == 2  # the second at once: the ranks are out of step
        assert all("for rank 2, which hangs or is gone" in text for text in told["errors"])
        assert 0.9 < told["seconds"] < 20
        assert told["cpu"] < 0.3


def test_a_late_rank_is_waited_for_asleep():
    for code, told in run_ranks("late", 2):
        assert code == 0
        assert told["total"] == [2.0] * 4
        assert told["cpu"] < 0.2


def test_all_ranks_keep_their_sockets_when_one_has_no_memory():
    assert [told for _, told in run_ranks("lacking", 2)] == [{"total": [2.0] * 4}] * 2


def shared_memories() -> Counter[str]:
    """This process's descriptors of memory that ranks share; others come and go meanwhile."""
    found = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            name = os.readlink(path)
            found[name] += name.startswith("/memfd:rollout-")
    return +found


def shared(executor):
    return [f.result(10)[0]["shared_memory"] for f in executor.call("info", {})]


def test_ranks_of_an_engine_share_memory_and_without_a_compiler_they_do_without(tiny, monkeypatch):
    settings = {"executor": "multiprocess", "tensor_parallel_size": 2}
    before = shared_memories()
    with running(tiny[0], **settings) as executor:
        assert shared(executor) == [True, True]
        tokens = [s.token_ids for s in generate(executor, [[3, 4, 5]], 6)]
    assert shared_memories() <= before
    assert [link._sock.fileno() for link in executor._links] == [-1, -1]
    monkeypatch.setenv("CC", "/nowhere/cc")
    with running(tiny[0], **settings) as executor:
        assert shared(executor) == [False, False]
        assert tokens == [s.token_ids for s in generate(executor, [[3, 4, 5]], 6)]
