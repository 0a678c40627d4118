"""Sockets between the trainer ranks that send and the engine ranks that receive, for one update.

Each engine rank holds one connection to each sender; both ends have proven the rendezvous's
secret. Before each payload goes a preamble, (index, nbytes), so that a receiver knows what comes.
Closing frees whoever waits on either end, at once. Nothing here waits anywhere but in Python and
its sockets, so that a program may end at any time.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from torch import Tensor

from rollout.distributed.rendezvous import (
    Board,
    Door,
    Rendezvous,
    enter,
    local_address,
)
from rollout.errors import DeadlineExceeded, TransferFailed
from rollout.wire.frames import tensor_bytes

_PREAMBLE = struct.Struct("<QQ")
_LOOK = 0.05  # seconds between looks at whether the update was aborted
_JOIN = 1.0  # seconds for a thread whose socket was shut down


class Links:
    """One member's connections: ranks 0 .. senders-1 send, the others receive, by rank.

    ``close`` is for any thread, everything else for one at a time.
    """

    def __init__(self, where: Rendezvous, rank: int, senders: int) -> None:
        self._where, self._rank, self._senders = where, rank, senders
        self._links: dict[int, _Link] = {}
        self._posted: dict[int, list[_Posted]] = {}
        self._closed = False
        self._lock = threading.Lock()  # held by whoever uses the sockets

    def connect(self, timeout: float) -> None:
        """Meet all members on the other side, collectively, within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._using("while the links formed"):
            try:
                if self._rank < self._senders:
                    self._listen(deadline)
                else:
                    self._knock(deadline)
            except DeadlineExceeded as error:
                where = self._where
                raise DeadlineExceeded(
                    f"rank {self._rank} of {where.size} at {where.host}:{where.port}: the group "
                    f"did not form within {timeout:g} s; are all members up, and may the engine's "
                    "ranks connect to the trainer's (any port)? transport='grpc_stream' needs the "
                    "engine's port alone"
                ) from error

    def post(self, index: int, peer: int, payload: Tensor) -> None:
        """Start sending; ``payload``, uint8, stays untouched until ``wait``."""
        link = self._links.get(peer)
        if self._closed or link is None:
            raise TransferFailed(f"the link to rank {peer} was closed before bucket {index}")
        self._posted.setdefault(index, []).append(link.post(index, tensor_bytes(payload)))

    def wait(self, index: int, timeout: float) -> None:
        """Until everything posted as ``index`` has left; ``TransferFailed`` if a link broke."""
        deadline = time.monotonic() + timeout
        for posted in self._posted.pop(index, ()):
            if not posted.done.wait(max(0.0, deadline - time.monotonic())):
                raise DeadlineExceeded(
                    f"the engine's ranks did not read bucket {index} within {timeout:g} s "
                    "(phase: transfer)"
                )
            if posted.error is not None:
                raise TransferFailed(
                    f"a link to the engine's ranks broke at bucket {index}: {posted.error}"
                ) from posted.error

    def receive(self, index: int, peer: int, into: Tensor, timeout: float) -> None:
        """What ``peer`` posted as ``index``, exactly as long as ``into``, uint8."""
        deadline = time.monotonic() + timeout
        with self._using(f"while receiving bucket {index}"):
            sock = self._links[peer].sock
            try:
                head = bytearray(_PREAMBLE.size)
                _fill(sock, memoryview(head), deadline)
                came, nbytes = _PREAMBLE.unpack(head)
                if (came, nbytes) != (index, into.numel()):
                    raise TransferFailed(
                        f"rank {self._rank}: bucket {came} of {nbytes} bytes came from rank {peer} "
                        f"where bucket {index} of {into.numel()} was announced"
                    )
                _fill(sock, tensor_bytes(into), deadline)
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"rank {self._rank}: bucket {index} was announced but did not arrive from rank "
                    f"{peer} within {timeout:g} s (phase: transfer)"
                ) from error
            except OSError as error:
                raise TransferFailed(
                    f"rank {self._rank}: the link to rank {peer} broke at bucket {index}: {error}"
                ) from error

    def close(self) -> None:
        """Drop all connections; whoever waits on one, here or there, gets an error. Idempotent."""
        self._closed = True
        for link in list(self._links.values()):
            link.shut()
        self._tidy()

    # ---- helpers ----

    @contextmanager
    def _using(self, when: str) -> Iterator[None]:
        try:
            with self._lock:
                if self._closed:
                    raise TransferFailed("closed")
                yield
        except TransferFailed as error:
            if self._closed:
                raise TransferFailed(f"rank {self._rank}: aborted {when}") from error
            raise
        finally:
            if self._closed:
                self._tidy()

    def _tidy(self) -> None:
        """Close what was shut down, unless somebody is still inside, who does it on the way out."""
        if self._lock.acquire(blocking=False):
            try:
                for link in self._links.values():
                    link.close()
                self._links = {}
            finally:
                self._lock.release()

    def _listen(self, deadline: float) -> None:
        where = self._where
        missing = set(range(self._senders, where.size))
        with (
            closing(Board(where, self._rank, deadline, self._is_closed)) as board,
            closing(Door(local_address(where.host), where.secret)) as door,
        ):
            board.write(f"link/{self._rank}", json.dumps([door.host, door.port]).encode())
            while missing:
                self._check(deadline)
                board.look(0.001)  # raises where the rendezvous was closed
                for sock, rank in door.wait(_LOOK)[0]:
                    if rank in missing:
                        self._links[rank] = _Link(sock, rank)
                        missing.discard(rank)
                    else:
                        sock.close()

    def _knock(self, deadline: float) -> None:
        missing = {f"link/{sender}": sender for sender in range(self._senders)}
        with closing(Board(self._where, self._rank, deadline, self._is_closed)) as board:
            while missing:
                self._check(deadline)
                written = board.look(_LOOK)
                for key in set(missing) & set(written):
                    host, port = json.loads(written[key])
                    sender = missing.pop(key)
                    secret = self._where.secret
                    sock = enter(host, port, secret, self._rank, deadline, self._is_closed)
                    self._links[sender] = _Link(sock, sender)

    def _is_closed(self) -> bool:
        return self._closed

    def _check(self, deadline: float) -> None:
        if self._closed:
            raise TransferFailed("closed")
        if time.monotonic() > deadline:
            raise DeadlineExceeded("the members did not come")


class _Posted:
    def __init__(self, index: int, data: memoryview) -> None:
        self.index, self.data = index, data
        self.done = threading.Event()
        self.error: OSError | None = None


class _Link:
    """One connection, and the thread that writes to it, once there is something to write."""

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self.sock, self._peer = sock, peer
        self._queue: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def post(self, index: int, data: memoryview) -> _Posted:
        posted = _Posted(index, data)
        if self._thread is None:
            name = f"update-link-{self._peer}"
            self._thread = threading.Thread(target=self._write, name=name, daemon=True)
            self._thread.start()
        self._queue.put(posted)
        return posted

    def shut(self) -> None:
        with suppress(OSError):  # the other end was gone already
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_JOIN)
        self.sock.close()

    def _write(self) -> None:
        while (posted := self._queue.get()) is not None:
            try:
                self.sock.sendall(_PREAMBLE.pack(posted.index, posted.data.nbytes))
                self.sock.sendall(posted.data)
            except OSError as error:
                posted.error = error
            posted.data = memoryview(b"")
            posted.done.set()


def _fill(sock: socket.socket, into: memoryview, deadline: float) -> None:
    while into:
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        count = sock.recv_into(into)
        if not count:
            raise ConnectionError("it was closed")
        into = into[count:]
