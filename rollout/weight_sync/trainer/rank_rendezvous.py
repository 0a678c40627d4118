"""How the ranks of one trainer find each other: a star of sockets, through their job's store."""

from __future__ import annotations

import json
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rollout import errors
from rollout.distributed import LOOPBACK
from rollout.errors import DeadlineExceeded, TransferFailed, some

_HELLO = 8 + 1 + 32  # bytes: the member's index, a blank, the secret


def meet(me: int, ranks: tuple[int, ...], timeout: float) -> dict[int, socket.socket]:
    """Form the star through the job's store; the links by member index.

    Each peer leaves a fresh nonce under its own key, the centre takes it away and answers that
    nonce with an address and a secret, or with who is missing. So neither a rank that skipped or
    gave up an update nor one left over from a failed one can make later meetings miss each other.
    """
    deadline = time.monotonic() + timeout
    store = dist.distributed_c10d._get_default_store()
    host = job_address()
    prefix = "rollout/agree/" + ",".join(map(str, ranks))
    # A clone, so that a wait here does not hold the connection the job itself uses.
    mine = dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
    try:
        if me:  # the centre, which knows who is missing, speaks first
            return {0: _join(mine, me, ranks, deadline + min(1.0, timeout / 4))}
        return _gather_peers(mine, host, ranks, deadline)
    except errors.RolloutError:
        raise  # DeadlineExceeded is an OSError, too
    except (RuntimeError, OSError) as error:  # DistError is a RuntimeError
        raise TransferFailed(
            f"trainer rank {ranks[me]} could not meet ranks {list(ranks)}: {error}"
        ) from error


def _gather_peers(
    store: Any, host: str, ranks: tuple[int, ...], deadline: float
) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    secret = secrets.token_hex(16)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
            listener.listen(len(ranks) + 8)
            address = {"host": host, "port": listener.getsockname()[1], "secret": secret}
            for nonce in _nonces(store, ranks, deadline):
                store.set(f"answer/{nonce}", json.dumps(address))
            while len(links) < len(ranks) - 1:
                _accept(listener, secret, links, ranks, deadline)
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return links


def _nonces(store: Any, ranks: tuple[int, ...], deadline: float) -> list[str]:
    """Of all peers; where some do not come, those that have are told which."""
    found: dict[int, str | None] = {}
    for index in range(1, len(ranks)):
        there = None not in found.values() or store.check([f"hello/{index}"])
        found[index] = _take(store, f"hello/{index}", deadline) if there else None
    come = [nonce for nonce in found.values() if nonce is not None]
    missing = [str(ranks[index]) for index, nonce in found.items() if nonce is None]
    if not missing:
        return come
    error = DeadlineExceeded(
        f"trainer rank {some(missing)} did not come to the update within the timeout (phase "
        "'meet'); every rank of a distributed source must call update_weights"
    )
    for nonce in come:
        store.set(f"answer/{nonce}", json.dumps({"error": errors.to_wire(error)}))
    raise error


def _accept(
    listener: socket.socket,
    secret: str,
    links: dict[int, socket.socket],
    ranks: tuple[int, ...],
    deadline: float,
) -> None:
    """Admit one connection that knows the secret; others are dropped."""
    listener.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        link, _ = listener.accept()
    except TimeoutError:
        missing = sorted(set(range(1, len(ranks))) - set(links))
        raise DeadlineExceeded(
            f"trainer rank {some([str(ranks[i]) for i in missing])} did not connect within "
            "the timeout (phase 'meet')"
        ) from None
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


def _join(store: Any, me: int, ranks: tuple[int, ...], deadline: float) -> socket.socket:
    nonce = secrets.token_hex(8)
    store.set(f"hello/{me}", nonce)
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
    link = socket.create_connection(
        (where["host"], where["port"]), timeout=max(0.01, deadline - time.monotonic())
    )
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


def job_address() -> str:
    """The address of this machine that the job's other members reach.

    It is the interface that leads to the host of the job's TCPStore; a job on one machine, or one
    that met through a file, stays on loopback.
    """
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", LOOPBACK)
    info = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
        probe.connect(info[4])
        return str(probe.getsockname()[0])
