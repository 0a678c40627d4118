"""How the ranks of one trainer find each other: a star of sockets, through their job's store."""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rollout import errors
from rollout.distributed import LOOPBACK, host_port, is_loopback, local_address
from rollout.errors import DeadlineExceeded, TransferFailed, some

_REACH = (
    "hosts of one job reach each other at any port, and its MASTER_ADDR is an address that all of "
    "them reach"
)
_HELLO = 8 + 1 + 32  # bytes: the member's index, a blank, the secret


def meet(me: int, ranks: tuple[int, ...], timeout: float) -> dict[int, socket.socket]:
    """Form the star through the job's store; the links by member index.

    Each peer leaves a fresh nonce and its address under its own key, the centre takes them away
    and answers that nonce with an address and a secret, or with who is missing. So neither a rank
    that skipped or gave up an update nor one left over from a failed one can make later meetings
    miss each other.
    """
    deadline = time.monotonic() + timeout
    store = dist.distributed_c10d._get_default_store()
    here = _job_address()
    prefix = "rollout/agree/" + ",".join(map(str, ranks))
    # A clone, so that a wait here does not hold the connection the job itself uses.
    mine = dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
    try:
        if me:  # the centre, which knows who is missing, speaks first
            return {0: _join(mine, me, here, ranks, deadline + min(1.0, timeout / 4))}
        return _gather_peers(mine, here, ranks, deadline)
    except errors.RolloutError:
        raise  # DeadlineExceeded is an OSError, too
    except (RuntimeError, OSError) as error:  # DistError is a RuntimeError
        raise TransferFailed(
            f"trainer rank {ranks[me]} could not meet ranks {list(ranks)}: {error}"
        ) from error


def _gather_peers(
    store: Any, here: str, ranks: tuple[int, ...], deadline: float
) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    secret = secrets.token_hex(16)
    with ExitStack() as listening:
        doors: dict[str, socket.socket] = {}  # by the address of ours that a peer reaches
        try:
            for nonce, there in _hellos(store, ranks, deadline):
                host = _reached_from(there, here)
                if host not in doors:
                    doors[host] = listening.enter_context(_listener(host, len(ranks)))
                port = doors[host].getsockname()[1]
                store.set(
                    f"answer/{nonce}", json.dumps({"host": host, "port": port, "secret": secret})
                )
            while len(links) < len(ranks) - 1:
                _accept(doors, secret, links, ranks, deadline)
        except BaseException:
            for link in links.values():
                link.close()
            raise
    return links


def _listener(host: str, size: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(size + 8)
        listener.setblocking(False)
        return listener
    except BaseException:
        listener.close()
        raise


def _reached_from(there: str, here: str) -> str:
    """The address of this machine for a peer at ``there``. The name of the store's host may mean
    loopback ``here`` (Debian's 127.0.1.1) and its real address on other hosts.
    """
    away = is_loopback(here) and not is_loopback(there)
    return local_address(there) if away else here


def _hellos(store: Any, ranks: tuple[int, ...], deadline: float) -> list[tuple[str, str]]:
    """Nonces and addresses of all peers; where some do not come, those that have hear which."""
    found: dict[int, str | None] = {}
    for index in range(1, len(ranks)):
        there = None not in found.values() or store.check([f"hello/{index}"])
        found[index] = _take(store, f"hello/{index}", deadline) if there else None
    parts = (said.partition(" ") for said in found.values() if said is not None)
    come = [(nonce, address) for nonce, _, address in parts]
    missing = [str(ranks[index]) for index, said in found.items() if said is None]
    if not missing:
        return come
    message = (
        f"trainer rank {some(missing)} did not come to the update within the timeout (phase "
        "'meet'); every rank of a distributed source must call update_weights"
    )
    # No name for what is raised: with its traceback it would keep the store's connection.
    answer = json.dumps({"error": errors.to_wire(DeadlineExceeded(message))})
    for nonce, _ in come:
        store.set(f"answer/{nonce}", answer)
    raise DeadlineExceeded(message)


def _accept(
    doors: Mapping[str, socket.socket],
    secret: str,
    links: dict[int, socket.socket],
    ranks: tuple[int, ...],
    deadline: float,
) -> None:
    """Admit one connection that knows the secret, at whichever door; others are dropped."""
    with selectors.DefaultSelector() as ready:
        for door in doors.values():
            ready.register(door, selectors.EVENT_READ, door)
        came = ready.select(max(0.01, deadline - time.monotonic()))
    if not came:
        missing = sorted(set(range(1, len(ranks))) - set(links))
        at = some([host_port(host, door.getsockname()[1]) for host, door in doors.items()])
        raise DeadlineExceeded(
            f"trainer rank {some([str(ranks[i]) for i in missing])} did not connect to {at} within "
            f"the timeout (phase 'meet'); {_REACH}"
        )
    try:
        link, _ = came[0][0].data.accept()
    except OSError:  # it has left again
        return
    try:
        link.settimeout(max(0.01, min(2.0, deadline - time.monotonic())))
        hello = b""
        while len(hello) < _HELLO and (more := link.recv(_HELLO - len(hello))):
            hello += more  # never more than the hello: the first status may be right behind it
    except OSError:
        hello = b""
    member, _, theirs = hello.decode("ascii", "replace").partition(" ")
    index = int(member) if member.isdecimal() else 0
    known = secrets.compare_digest(theirs.encode(), secret.encode())
    if not known or not 0 < index < len(ranks) or index in links:
        link.close()
        return
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    links[index] = link


def _join(store: Any, me: int, here: str, ranks: tuple[int, ...], deadline: float) -> socket.socket:
    nonce = secrets.token_hex(8)
    store.set(f"hello/{me}", f"{nonce} {here}")
    answer = _take(store, f"answer/{nonce}", deadline)
    if answer is None:
        with suppress(RuntimeError):
            store.delete_key(f"hello/{me}")
        raise DeadlineExceeded(
            f"trainer rank {ranks[0]} did not come to the update within the timeout "
            "(phase 'meet'); every rank of a distributed source must call update_weights"
        )
    where = json.loads(answer)
    if "error" in where:
        raise errors.from_wire(where["error"])
    host, port = where["host"], where["port"]
    try:
        link = socket.create_connection((host, port), max(0.01, deadline - time.monotonic()))
    except OSError as error:
        raise TransferFailed(
            f"trainer rank {ranks[me]} does not reach rank {ranks[0]} at {host_port(host, port)} "
            f"(phase 'meet'): {error}; {_REACH}"
        ) from error
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(f"{me:08d} {where['secret']}".encode())
    return link


def _take(store: Any, key: str, deadline: float) -> str | None:
    """The value of ``key``, removed from the store; None when it does not come in time."""
    left = max(0.01, deadline - time.monotonic())
    try:
        store.wait([key], timedelta(seconds=left))
    except RuntimeError as error:  # DistStoreError from a TCPStore, a plain one from a FileStore
        if "timeout" not in str(error).lower():
            raise
        return None
    value = store.get(key).decode()
    store.delete_key(key)
    return str(value)


def met_at(links: Iterable[socket.socket]) -> str:
    """The address of this machine that members on other hosts have come to; loopback where none
    have.
    """
    found = [str(link.getsockname()[0]) for link in links if link.family != socket.AF_UNIX]
    away = (address for address in found if not is_loopback(address))
    return next(away, found[0] if found else LOOPBACK)


def _job_address() -> str:
    """The address of this machine that the job's other members reach, but for loopback.

    It is the interface that leads to the host of the job's TCPStore; a job on one machine, or one
    that met through a file, stays on loopback.
    """
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return local_address(getattr(store, "host", LOOPBACK))
