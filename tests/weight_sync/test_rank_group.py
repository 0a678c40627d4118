"""What trainer ranks say to one another, and what they hear when one of them is gone."""

from __future__ import annotations

import socket
import threading

import pytest

from rollout.errors import TransferFailed
from rollout.weight_sync.trainer.rank_group import RankGroup


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
