"""What trainer ranks say to one another, and what they hear when one of them is gone."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from free_ports import free_port

from rollout.distributed import local_address
from rollout.errors import DeadlineExceeded, TransferFailed, VersionConflict
from rollout.weight_sync.trainer import rank_rendezvous
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.star import Star
from rollout.wire import frames


def groups(size: int) -> list[RankGroup]:
    """Members over socket pairs: a star around the first."""
    pairs = {index: socket.socketpair() for index in range(1, size)}
    first = RankGroup(0, range(size), {index: near for index, (near, _) in pairs.items()})
    return [first, *(RankGroup(i, range(size), {0: far}) for i, (_, far) in pairs.items())]


def test_rows_that_one_rank_owes_leave_nothing_unread_for_the_next_call() -> None:
    first, gone, third = groups(3)
    heard: list[BaseException] = []

    def others() -> None:
        third.collect_rows({"mine": 3}, 10, "digests")
        try:
            third.first_does(lambda: 0, 10, "commit", lambda _: {}, lambda _: 0)
        except TransferFailed as error:
            heard.append(error)

    thread = threading.Thread(target=others)
    thread.start()
    gone.close()

    def act() -> int:
        return len(first.collect_rows({"mine": 1}, 10, "digests"))

    with pytest.raises(TransferFailed, match="trainer rank 1 is gone") as raised:
        first.first_does(act, 10, "commit", lambda _: {}, lambda _: 0)
    thread.join(30)
    assert [str(error) for error in heard] == [str(raised.value)]
    first.close()
    third.close()


@pytest.mark.parametrize("sent", [0, 4, 30])
def test_who_left_is_named_wherever_in_a_frame_it_left(sent: int) -> None:
    near, far = socket.socketpair()
    frame = b"".join(bytes(part) for part in frames.encode({"kind": "part", "of": "a frame"}))
    far.sendall(frame[:sent])
    far.close()
    with near, pytest.raises(TransferFailed, match="trainer rank 7 is gone, at 'digests'"):
        Star((5, 7), {1: near}).receive(1, 10, "digests")


def test_a_rank_elsewhere_is_told_so_where_the_first_one_fails_alone() -> None:
    first, other = groups(2)

    def fails() -> None:
        raise VersionConflict("version 3 is live")

    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(other.vote, None, 10, "bucket")
        with pytest.raises(VersionConflict, match="version 3 is live"):
            first.first_does(fails, 10, "begin", lambda _: {}, lambda _: None)
        with pytest.raises(
            TransferFailed, match="rank 1 is at 'bucket' while rank 0 is at 'begin'"
        ):
            heard.result(30)
    assert first.is_closed
    assert other.is_closed


def test_a_meeting_that_failed_keeps_no_connection_to_the_store() -> None:
    class Empty:
        def wait(self, *_: Any) -> None:
            raise RuntimeError("timeout")

        def check(self, _: Any) -> bool:
            return False

    def meets(store: Empty) -> None:
        with suppress(DeadlineExceeded):
            rank_rendezvous._gather_peers(store, "127.0.0.1", (0, 1, 2), time.monotonic())

    store = Empty()
    kept = weakref.ref(store)
    gc.disable()
    try:
        meets(store)
        del store
        assert kept() is None
    finally:
        gc.enable()


RANK = """
import sys
import torch.distributed as dist
from rollout.weight_sync.trainer.rank_group import RankGroup

rank, host, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store = dist.TCPStore(host, port, 2, is_master=rank == 0, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = RankGroup.over([0, 1], 20)
print(group.exchange({"address": group.address}, 20))
dist.destroy_process_group()
"""


def test_ranks_meet_where_the_name_of_the_first_host_means_loopback_there() -> None:
    """As of Debian's 127.0.1.1: the job's store is at that name, which others have right."""
    try:
        away = local_address("203.0.113.7")
    except TransferFailed:
        pytest.skip("this machine has no address but loopback")
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), host, port],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, host in enumerate(("127.0.1.1", away))
    ]  # fmt: skip
    said = [rank.communicate(timeout=100)[0] for rank in ranks]
    expected = [{"address": away}, {"address": away}]
    assert all(text.endswith(f"{expected}\n") for text in said), said
