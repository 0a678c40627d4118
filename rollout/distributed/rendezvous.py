"""Where the members of a group meet: a listening socket that serves only who knows its secret.

The secret travels over the control channel and never over these sockets. Each side proves that it
has it by a keyed hash of both sides' nonces:

    member                                 door
      <---------------- nonce --------------
      -- nonce, rank, proof --------------->       else the connection is closed
      <---------------- proof --------------       else the member leaves

Whoever connects without it is served nothing, is dropped after ``_PATIENCE`` seconds, and takes one
of ``_GUESTS`` places from which the newest comer pushes the oldest; a member that was pushed out
knocks again until its deadline.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from rollout.errors import ConfigError, DeadlineExceeded, TransferFailed
from rollout.wire.codec import Text

LOOPBACK = "127.0.0.1"

_NONCE, _RANK, _PROOF = 32, 4, 32  # bytes
_ANSWER = _NONCE + _RANK + _PROOF
_GUESTS = 64  # connections that have not proven anything yet
_PATIENCE = 5.0  # seconds for one of them to do so
_AGAIN = 0.05  # seconds before a member knocks again
_LINE = 1 << 20  # bytes of one thing that a member says
_SEND_LIMIT = 5.0  # seconds for a member to take what the others have said
_LOOK = 0.2  # seconds between looks at whether it has been closed


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the members of a group meet: plain values that travel over the control channel."""

    host: Text
    port: Annotated[int, Meta(ge=1, le=65535)]
    secret: Text = field(repr=False)
    size: Annotated[int, Meta(ge=1, le=1 << 20)]
    backend: Text  # tcp: sockets of ours | gloo | nccl


class Door:
    """A listening socket that lets in who proves the secret. For one thread, ``close`` for any.

    Watches sockets of those who are inside, too, so that one thread can wait for everything.
    """

    def __init__(self, host: str, secret: str) -> None:
        self._secret = secret.encode()
        self._listener = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            self._listener.bind((host, 0))
            self._listener.listen(_GUESTS * 2)
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"cannot listen on {host} for the weight group: {error}") from error
        self._listener.setblocking(False)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._guests: dict[socket.socket, _Guest] = {}  # the oldest first
        self._watched = selectors.DefaultSelector()
        self._watched.register(self._listener, selectors.EVENT_READ, self._listener)

    def watch(self, sock: socket.socket) -> None:
        """Have ``wait`` tell when ``sock`` can be read."""
        self._watched.register(sock, selectors.EVENT_READ, sock)

    def forget(self, sock: socket.socket) -> None:
        self._watched.unregister(sock)

    def wait(self, timeout: float) -> tuple[list[tuple[socket.socket, int]], list[socket.socket]]:
        """Within ``timeout`` seconds: those let in now with their ranks, and who can be read."""
        admitted: list[tuple[socket.socket, int]] = []
        readable: list[socket.socket] = []
        for key, _ in self._watched.select(timeout):
            sock = key.data
            if sock is self._listener:
                self._greet()
            elif sock.fileno() < 0:
                continue  # sent away for a newer one
            elif (guest := self._guests.get(sock)) is None:
                readable.append(sock)
            elif (rank := guest.read(sock, self._secret)) is not None:
                del self._guests[sock]
                self._watched.unregister(sock)
                if rank < 0:
                    sock.close()
                else:
                    admitted.append((sock, rank))
        self._send_away(lambda guest: time.monotonic() > guest.deadline)
        return admitted, readable

    def close(self) -> None:
        self._send_away(lambda guest: True)
        self._watched.close()
        self._listener.close()

    def _greet(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has left again, or there are no descriptors
            time.sleep(_AGAIN)
            return
        sock.setblocking(False)
        if len(self._guests) >= _GUESTS:
            oldest = next(iter(self._guests.values()))
            self._send_away(lambda guest: guest is oldest)
        guest = self._guests[sock] = _Guest()
        self._watched.register(sock, selectors.EVENT_READ, sock)
        with suppress(OSError):  # then it will be found at its end
            sock.send(guest.nonce)

    def _send_away(self, which: Callable[[_Guest], bool]) -> None:
        for sock in [sock for sock, guest in self._guests.items() if which(guest)]:
            del self._guests[sock]
            self._watched.unregister(sock)
            sock.close()


class _Guest:
    """A connection that has proven nothing yet."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(_NONCE)
        self.deadline = time.monotonic() + _PATIENCE
        self._said = b""

    def read(self, sock: socket.socket, secret: bytes) -> int | None:
        """Its rank once it has proven the secret, -1 if it cannot; None while more has to come."""
        try:
            more = sock.recv(_ANSWER - len(self._said))
        except BlockingIOError:
            return None
        except OSError:
            return -1
        self._said += more
        if len(self._said) < _ANSWER:
            return None if more else -1
        theirs, rank = self._said[:_NONCE], self._said[_NONCE : _NONCE + _RANK]
        proven = _proof(secret, b"member", self.nonce, theirs, rank)
        if not hmac.compare_digest(self._said[_NONCE + _RANK :], proven):
            return -1
        try:
            sock.send(_proof(secret, b"door", self.nonce, theirs, rank))
        except OSError:
            return -1
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return int.from_bytes(rank, "big")


def enter(
    host: str,
    port: int,
    secret: str,
    rank: int,
    deadline: float,
    given_up: Callable[[], bool] = lambda: False,
) -> socket.socket:
    """Connect to a ``Door`` as ``rank``, each side proving to the other that it has the secret.

    Raises ``TransferFailed`` at once where nobody listens: the socket is bound before its place is
    announced, so that a refusal means that its owner is gone. ``DeadlineExceeded`` where it did
    not let this member in. Looks every few seconds at whether it was ``given_up``.
    """
    while True:
        left = deadline - time.monotonic()
        if given_up():
            raise TransferFailed(f"rank {rank} was told to leave")
        if left <= 0:
            raise DeadlineExceeded(f"rank {rank} was not let in at {host}:{port} in time")
        try:
            sock = _connected(host, port, min(left, _PATIENCE), given_up)
        except TimeoutError:
            continue
        except ConnectionRefusedError as error:
            raise TransferFailed(
                f"rank {rank}: nobody listens at {host}:{port}; the peer that announced it is "
                f"gone ({error})"
            ) from error
        except OSError as error:
            raise TransferFailed(
                f"rank {rank} does not reach {host}:{port}, which its peer announced: {error}"
            ) from error
        try:
            if _introduced(sock, secret.encode(), rank.to_bytes(_RANK, "big")):
                sock.settimeout(None)
                return sock
        except OSError:
            pass
        except BaseException:
            sock.close()
            raise
        sock.close()
        time.sleep(min(_AGAIN, max(0.0, deadline - time.monotonic())))


def _connected(host: str, port: int, timeout: float, given_up: Callable[[], bool]) -> socket.socket:
    """``TimeoutError`` where nothing answers in ``timeout`` seconds, or it was ``given_up``."""
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        until, error = time.monotonic() + timeout, sock.connect_ex((host, port))
        if error == errno.EINPROGRESS:
            with selectors.DefaultSelector() as ready:
                ready.register(sock, selectors.EVENT_WRITE)
                while not ready.select(_LOOK):
                    if given_up() or time.monotonic() > until:
                        raise TimeoutError
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        sock.settimeout(timeout)
        return sock
    except BaseException:
        sock.close()
        raise


def _introduced(sock: socket.socket, secret: bytes, rank: bytes) -> bool:
    theirs = _exactly(sock, _NONCE)
    mine = secrets.token_bytes(_NONCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(mine + rank + _proof(secret, b"member", theirs, mine, rank))
    return hmac.compare_digest(_exactly(sock, _PROOF), _proof(secret, b"door", theirs, mine, rank))


def _proof(secret: bytes, who: bytes, door: bytes, member: bytes, rank: bytes) -> bytes:
    return hmac.digest(secret, who + door + member + rank, hashlib.sha256)


def _exactly(sock: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = sock.recv(size - len(got))
        if not more:
            raise ConnectionError("closed")
        got += more
    return got


class RendezvousServer:
    """The door of a group, and a board behind it: what one member writes there, all others read.

    Listens on ``host`` until ``close``; a thread serves it, which waits on sockets alone. What a
    member wrote is gone with its connection, so that nobody looks for one that has given up.
    """

    def __init__(self, size: int, backend: str, host: str = LOOPBACK) -> None:
        secret = secrets.token_hex(16)
        self._door = Door(host, secret)
        self.info = Rendezvous(host, self._door.port, secret, size, backend)
        self._members: dict[socket.socket, _Member] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="rollout-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; those who are still meeting see an error. Idempotent."""
        self._closed.set()
        with suppress(OSError):  # a knock, so that the thread looks up at once
            socket.create_connection((self.info.host, self.info.port), _LOOK).close()
        if threading.current_thread() is not self._thread:
            self._thread.join(10 * _LOOK)

    def _serve(self) -> None:
        try:
            while not self._closed.is_set():
                admitted, readable = self._door.wait(_LOOK)
                for sock, _ in admitted:
                    sock.settimeout(_SEND_LIMIT)
                    self._members[sock] = _Member()
                    self._door.watch(sock)
                    self._tell(sock, b"".join(m.written for m in self._members.values()))
                for sock in readable:
                    if sock in self._members:  # not gone meanwhile
                        self._read(sock)
        finally:
            for sock in self._members:
                sock.close()
            self._door.close()

    def _read(self, sock: socket.socket) -> None:
        member = self._members[sock]
        try:
            more = sock.recv(1 << 16)
        except OSError:
            more = b""
        if not more or len(member.half) + len(more) > _LINE:
            self._drop(sock)
            return
        whole, end, member.half = (member.half + more).rpartition(b"\n")
        member.written += whole + end
        for other in list(self._members):
            if other is not sock:
                self._tell(other, whole + end)

    def _tell(self, sock: socket.socket, lines: bytes) -> None:
        try:
            sock.sendall(lines)
        except OSError:
            self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        if self._members.pop(sock, None) is not None:
            self._door.forget(sock)
            sock.close()


@dataclass(slots=True)
class _Member:
    written: bytes = b""  # whole lines
    half: bytes = b""  # of a line


class Board:
    """A member's view of what the others have written; for one thread.

    ``TransferFailed`` when the server is gone, ``DeadlineExceeded`` from ``get``.
    """

    def __init__(
        self,
        where: Rendezvous,
        rank: int,
        deadline: float,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._where = where
        self._sock = enter(where.host, where.port, where.secret, rank, deadline, given_up)
        self._half = b""
        self._read: dict[str, bytes] = {}

    def write(self, key: str, value: bytes) -> None:
        self._sock.settimeout(_SEND_LIMIT)
        try:
            self._sock.sendall(json.dumps([key, value.hex()]).encode() + b"\n")
        except OSError as error:
            raise self._gone() from error

    def look(self, timeout: float) -> dict[str, bytes]:
        """Everything the others have written so far, by key, after at most ``timeout`` seconds."""
        self._sock.settimeout(max(1e-3, timeout))
        try:
            more = self._sock.recv(1 << 16)
        except TimeoutError:
            return self._read
        except OSError as error:
            raise self._gone() from error
        if not more:
            raise self._gone()
        *lines, self._half = (self._half + more).split(b"\n")
        for line in lines:
            key, value = json.loads(line)
            self._read[key] = bytes.fromhex(value)
        return self._read

    def close(self) -> None:
        """Leave, once all that was written has been read: a socket that is closed on lines of
        others, which came meanwhile, takes back what it has sent.
        """
        self._sock.settimeout(_SEND_LIMIT)
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            while self._sock.recv(1 << 16):
                pass
        self._sock.close()

    def _gone(self) -> TransferFailed:
        return TransferFailed(
            f"the rendezvous at {self._where.host}:{self._where.port} was closed: the peer that "
            "announced it has given up"
        )


def local_address(host: str) -> str:
    """The address of this machine on the interface that reaches ``host``."""
    if host in ("localhost", LOOPBACK, "::1"):
        return LOOPBACK
    try:
        info = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
            probe.connect(info[4])
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransferFailed(f"no interface of this machine reaches {host}: {error}") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
