"""Groups form between strangers on loopback, and say so when a member does not come."""

import socket
import threading
import time
from contextlib import closing

import pytest
import torch

from rollout import distributed
from rollout.distributed import RendezvousServer, TensorParallel, join_group
from rollout.distributed.rendezvous import Board
from rollout.errors import DeadlineExceeded, TransferFailed


def run_ranks(size: int, work) -> None:
    failures: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_three_members_reduce_and_gather() -> None:
    server = RendezvousServer(3, "gloo")

    def work(rank: int) -> None:
        tp = TensorParallel(rank, 3, join_group(server.info, rank, 10.0))
        assert tp.all_reduce(torch.full((4,), float(rank))).tolist() == [3.0] * 4
        assert tp.all_gather(torch.tensor([[float(rank)]])).tolist() == [[0.0, 1.0, 2.0]]
        assert tp.all_reduces == 1

    run_ranks(3, work)
    server.close()


def test_a_missing_member_is_a_named_error_at_the_deadline() -> None:
    server = RendezvousServer(2, "gloo")
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="rank 0 of 2"):
        join_group(server.info, 0, 1.0)
    assert time.monotonic() - started < 8
    server.close()


def test_a_member_that_has_given_up_is_not_knocked_at_beyond_the_deadline() -> None:
    """Its address still lies in the store; gloo alone would try it for five times the timeout."""
    server = RendezvousServer(2, "gloo")
    for rank in (1, 0):
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=f"rank {rank} of 2"):
            join_group(server.info, rank, 2.0)
        assert time.monotonic() - started < 8
    server.close()


def test_the_rendezvous_listens_on_loopback_only() -> None:
    server = RendezvousServer(2, "gloo")
    with socket.create_connection(("127.0.0.1", server.info.port), 2):
        pass
    own = socket.gethostbyname(socket.gethostname())
    if not own.startswith("127."):
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((own, server.info.port), 2)
    server.close()


def test_one_rank_needs_no_group() -> None:
    tensor = torch.ones(2)
    assert TensorParallel().all_reduce(tensor) is tensor
    assert TensorParallel().all_gather(tensor) is tensor


def test_a_rendezvous_whose_owner_is_gone_is_an_error_at_once() -> None:
    server = RendezvousServer(2, "gloo")
    server.close()
    started = time.monotonic()
    with pytest.raises(TransferFailed, match="nobody listens"):
        join_group(server.info, 1, 10.0)
    assert time.monotonic() - started < 8


def test_what_a_member_wrote_last_reaches_the_others_though_it_is_done(monkeypatch) -> None:
    """Its group may form between two looks; then nobody would ever read its address."""

    monkeypatch.setattr(distributed, "gloo_group", lambda store, *_: store.set("address", b"here"))
    server = RendezvousServer(2, "gloo")
    with closing(Board(server.info, 1, time.monotonic() + 30)) as other:
        join_group(server.info, 0, 30)
        deadline = time.monotonic() + 30
        while not (read := other.look(0.1)):
            assert time.monotonic() < deadline
    server.close()
    assert read == {"0/address": b"here"}
