"""Members meet behind a door that serves nobody else, however many strangers stand before it."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rollout.distributed import RendezvousServer, TensorParallel, join_group, rendezvous
from rollout.distributed.rendezvous import (
    Board,
    Door,
    Rendezvous,
    enter,
    local_address,
)
from rollout.errors import DeadlineExceeded, TransferFailed
from rollout.weight_sync.transports.links import Links


@pytest.fixture(params=["gloo", "tcp"])
def server(request):
    server = RendezvousServer(3, request.param)
    yield server
    server.close()


def test_what_a_member_wrote_last_is_read_whatever_it_has_not_read_itself(server):
    """As where several groups meet behind one door, of which others go on talking."""
    deadline = time.monotonic() + 20
    with closing(Board(server.info, 0, deadline)) as stays:
        for turn in range(50):
            leaves = Board(server.info, 1, deadline)
            leaves.write(f"first {turn}", b"x")
            while f"first {turn}" not in stays.look(0.01):
                assert time.monotonic() < deadline
            for line in range(20):
                stays.write(f"{turn} {line}", b"y" * 100)
            leaves.write(f"last {turn}", b"z")
            leaves.close()
            while f"last {turn}" not in stays.look(0.01):
                assert time.monotonic() < deadline, turn


def form(where: Rendezvous) -> None:
    """Three members meet, and something goes from the first to the others."""
    failures: list[BaseException] = []

    def member(rank: int) -> None:
        try:
            if where.backend == "gloo":
                tp = TensorParallel(rank, 3, join_group(where, rank, 30.0))
                assert tp.all_reduce(torch.full((4,), float(rank))).tolist() == [3.0] * 4
                return
            with closing(Links(where, rank, 1)) as links:
                links.connect(30.0)
                if rank == 0:
                    payload = torch.arange(100, dtype=torch.uint8)
                    for peer in (1, 2):
                        links.post(7, peer, payload)
                    links.wait(7, 30.0)
                else:
                    into = torch.empty(100, dtype=torch.uint8)
                    links.receive(7, 0, into, 30.0)
                    assert into.tolist() == list(range(100))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert failures == []


def stranger(where: Rendezvous, timeout: float = 5.0) -> socket.socket:
    return socket.create_connection((where.host, where.port), timeout)


def keys_of_store_at(where: Rendezvous) -> list[str]:
    store = dist.TCPStore(
        where.host, where.port, is_master=False, wait_for_workers=False,
        timeout=timedelta(seconds=1),
    )  # fmt: skip
    return store.list_keys()


def look_until(board: Board, later: float) -> None:
    while time.monotonic() < later:
        board.look(0.1)


def said_to(sock: socket.socket) -> bytes:
    """Everything until the other side closes."""
    got = b""
    with suppress(OSError):
        while more := sock.recv(1 << 16):
            got += more
    return got


def test_a_stranger_reads_and_writes_nothing(server) -> None:
    where = server.info
    with pytest.raises(dist.DistError):
        keys_of_store_at(where)
    with stranger(where) as sock:
        sock.sendall(bytes(68))  # a nonce, a rank, and no proof
        assert len(said_to(sock)) == 32  # the door's nonce alone
    with stranger(where) as sock, suppress(OSError):
        for _ in range(64):
            sock.sendall(b'["link/0", "00"]\n' * 4096)
    wrong = Rendezvous(where.host, where.port, "0" * 32, 3, where.backend)
    with pytest.raises(DeadlineExceeded, match="not let in"):
        Board(wrong, 1, time.monotonic() + 0.5)
    form(where)


def test_strangers_who_come_first_and_stay_block_nobody(server) -> None:
    with ExitStack() as crowd:
        for _ in range(2 * rendezvous._GUESTS):
            crowd.enter_context(stranger(server.info))
        form(server.info)


def test_strangers_who_keep_coming_block_nobody(server) -> None:
    over = threading.Event()

    def knock() -> None:
        while not over.is_set():
            with suppress(OSError):
                stranger(server.info, 1.0).close()

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        form(server.info)
    finally:
        over.set()
        thread.join()


def test_a_stranger_is_sent_away_in_time(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.3)
    server = RendezvousServer(2, "tcp")
    with stranger(server.info, 30.0) as silent, stranger(server.info, 30.0) as slow:
        slow.sendall(b"x")
        assert [len(said_to(silent)), len(said_to(slow))] == [32, 32]
    server.close()


def test_whoever_took_the_port_of_a_door_learns_nothing_and_is_not_believed() -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as false:

        def pretend() -> None:
            sock, _ = false.accept()
            with sock:
                sock.sendall(bytes(32))
                heard.append(sock.recv(1000))
                sock.sendall(bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(DeadlineExceeded, match="not let in"):
            enter("127.0.0.1", false.getsockname()[1], "the secret", 1, time.monotonic() + 0.5)
        thread.join(30)
    assert len(heard[0]) == 68
    assert b"the secret" not in heard[0]


def test_a_member_that_is_told_to_leave_knocks_no_more_where_nothing_answers() -> None:
    """As behind a firewall that drops what comes: the door of a full queue does not answer."""
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        host, port = silent.getsockname()
        for _ in range(3):
            guest = stack.enter_context(socket.socket())
            guest.setblocking(False)
            guest.connect_ex((host, port))
        links = Links(Rendezvous(host, port, "0" * 32, 2, "tcp"), 1, 1)
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(links.connect, 30.0)
            with pytest.raises(TimeoutError):
                joined.result(1.0)
            links.close()
            with pytest.raises(TransferFailed, match="aborted while the links formed"):
                joined.result(3.0)


def test_what_a_member_wrote_is_gone_with_it() -> None:
    server = RendezvousServer(3, "tcp")
    later = time.monotonic() + 30
    with closing(Board(server.info, 0, later)) as stays:
        with closing(Board(server.info, 1, later)) as leaves:
            stays.write("here", b"\0\1")
            leaves.write("there", b"")
            while leaves.look(0.1) != {"here": b"\0\1"} or stays.look(0.1) != {"there": b""}:
                assert time.monotonic() < later
        while True:
            with closing(Board(server.info, 2, later)) as late:
                if (found := late.look(1.0)) == {"here": b"\0\1"}:
                    break
            assert time.monotonic() < later, found
        server.close()
        with pytest.raises(TransferFailed, match="given up"):
            look_until(stays, later)


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_closing_frees_whoever_waits_on_either_end(who) -> None:
    server = RendezvousServer(2, "tcp")
    sender, receiver = (Links(server.info, rank, 1) for rank in range(2))
    thread = threading.Thread(target=sender.connect, args=(30.0,))
    thread.start()
    receiver.connect(30.0)
    thread.join(30)
    payload = torch.zeros(64 << 20, dtype=torch.uint8)  # more than fits in the sockets
    ends: list[str] = []

    def send() -> None:
        sender.post(0, 1, payload)
        try:
            sender.wait(0, 60.0)
        except TransferFailed as error:
            ends.append(str(error))

    def receive() -> None:
        try:
            receiver.receive(0, 0, payload.clone(), 60.0)
            receiver.receive(1, 0, payload[:1], 60.0)
        except TransferFailed as error:
            ends.append(str(error))

    threads = [threading.Thread(target=send if who == "receiver" else receive)]
    threads[0].start()
    time.sleep(0.1)  # it waits by now, or will find the link closed
    started = time.monotonic()
    {"sender": sender, "receiver": receiver}[who].close()
    threads[0].join(30)
    assert len(ends) == 1
    assert time.monotonic() - started < 10
    sender.close()
    receiver.close()
    assert not any(t.name.startswith("update-link") for t in threading.enumerate())
    server.close()


def test_a_link_that_was_aborted_before_it_formed_says_so() -> None:
    server = RendezvousServer(2, "tcp")
    links = Links(server.info, 1, 1)
    timer = threading.Timer(0.1, links.close)
    timer.start()
    with pytest.raises(TransferFailed, match="rank 1: aborted while the links formed"):
        links.connect(60.0)
    timer.join()
    with pytest.raises(TransferFailed, match="aborted"):
        links.receive(0, 0, torch.empty(1, dtype=torch.uint8), 1.0)
    with pytest.raises(TransferFailed, match="closed before bucket 3"):
        links.post(3, 0, torch.empty(1, dtype=torch.uint8))
    server.close()


def test_a_door_forgets_a_knock_that_ends_at_once() -> None:
    door = Door("127.0.0.1", "secret")
    socket.create_connection((door.host, door.port), 5).close()
    deadline = time.monotonic() + 30
    while not door._guests and time.monotonic() < deadline:
        door.wait(0.1)
    while door._guests and time.monotonic() < deadline:
        door.wait(0.1)
    assert not door._guests
    door.close()


def test_a_sender_that_waits_for_links_hears_that_the_rendezvous_was_closed() -> None:
    server = RendezvousServer(3, "tcp")
    with ThreadPoolExecutor(1) as pool, closing(Links(server.info, 1, 2)) as links:
        waiting = pool.submit(links.connect, 60.0)
        time.sleep(0.3)
        server.close()
        with pytest.raises(TransferFailed, match="was closed"):
            waiting.result(20)


def test_a_member_that_knocks_in_vain_can_be_told_to_leave() -> None:
    """Its peer's kernel takes the connection, and nobody says a word."""
    with socket.socket() as silent, ThreadPoolExecutor(1) as pool:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        over = threading.Event()
        port = silent.getsockname()[1]
        deadline = time.monotonic() + 60
        waiting = pool.submit(enter, "127.0.0.1", port, "ab", 0, deadline, over.is_set)
        over.set()
        with pytest.raises(TransferFailed, match="told to leave"):
            waiting.result(30)


def test_a_host_that_no_interface_reaches_is_named() -> None:
    with pytest.raises(TransferFailed, match=r"no-such-host\.invalid"):
        local_address("no-such-host.invalid")
