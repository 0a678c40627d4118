"""Process groups without process-global state: tensor parallelism, rendezvous, devices.

Groups are raw backend objects (``ProcessGroupGloo`` / ``ProcessGroupNCCL``), so forming one never
touches ``torch.distributed``'s default group of the job it is formed in.
"""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.distributed.native_thread import NativeThread
from rollout.distributed.rendezvous import (
    LOOPBACK,
    Board,
    Rendezvous,
    RendezvousServer,
    local_address,
)
from rollout.errors import ConfigError, DeadlineExceeded, TransferFailed

__all__ = [
    "LOOPBACK",
    "Rendezvous",
    "RendezvousServer",
    "TensorParallel",
    "check_dtype",
    "choose_device",
    "gloo_group",
    "host_port",
    "is_loopback",
    "join_group",
    "local_address",
]

BFLOAT16 = (8, 0)  # compute capability from which cards compute in it

if torch.__version__ < "2.13":
    # The recorder of collectives that torch 2.11 has on by default (2.13's is sound) crashes the
    # process when two threads use gloo groups at once, as a transfer beside a step does. Read when
    # the first group of a process runs something.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")


@dataclass(slots=True)
class TensorParallel:
    """This rank's place among the ranks that share one model.

    ``group`` None is allowed for size 1, and for building every rank's tables in one process; a
    collective then raises. ``all_reduces`` counts them: a forward makes exactly 2 x layers + 1.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    all_reduces: int = field(default=0, compare=False)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; all ranks call it in the same order. Returns ``tensor``."""
        if self.size > 1:
            self.all_reduces += 1
            self.group.allreduce([tensor]).wait()
        return tensor

    def tree_sum(self, tensor: Tensor) -> Tensor:
        """Sum float32 over a power of two of ranks, neighbours first, then neighbours of the sums.

        The order is the same whatever carries it; all ranks call it in lockstep. ``tensor`` may be
        written over.
        """
        if getattr(self.group, "adds_by_tree", False):
            return self.all_reduce(tensor)
        self.all_reduces += self.size > 1
        parts = list(self.all_gather(tensor).chunk(self.size, dim=-1))
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate every rank's equal-shaped ``tensor`` along the last dimension."""
        if self.size == 1:
            return tensor
        if hasattr(self.group, "gather_last"):  # memory the ranks share
            joined: Tensor = self.group.gather_last(tensor)
            return joined
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self.group.allgather([parts], [tensor]).wait()
        return torch.cat(parts, dim=-1)


_SLACK = 0.5  # seconds in which gloo's own timeout may speak first
_LOOK = 0.002  # seconds between looks at a group that forms


def join_group(where: Rendezvous, rank: int, timeout: float, *, tag: str = "0") -> Any:
    """Form the group together with all ``where.size`` members; returns the raw process group.

    Collective: every member calls it with its own ``rank`` and the same ``tag`` within ``timeout``
    seconds; NCCL's on the caller's current device. Each member has a store in its own memory, and
    what a group writes to it travels over the authenticated board of the rendezvous: a ``TCPStore``
    would tell its keys to whoever connects. Raises ``TransferFailed`` or ``DeadlineExceeded``.
    """
    limit = timedelta(seconds=timeout)
    place = f"rank {rank} of {where.size} at {where.host}:{where.port}"
    with closing(Board(where, rank, time.monotonic() + timeout)) as board:
        store = dist.HashStore()
        store.set_timeout(limit)
        mirror = _Mirror(store, board, tag)
        try:
            if where.backend == "nccl":
                group = _formed(_nccl(store, rank, where.size, limit), limit, mirror.exchange)
            else:
                group = gloo_group(store, where.host, rank, where.size, limit, mirror.exchange)
            # This member may be done with what it wrote last still to be read by another; where
            # the rendezvous is closed already, all others are done, too.
            with suppress(TransferFailed):
                mirror.publish()
            return group
        except (RuntimeError, dist.DistError) as error:
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise DeadlineExceeded(
                    f"{place}: the group did not form within {timeout:g} s; are all members up?"
                ) from error
            raise TransferFailed(f"{place}: the group did not form: {error}") from error


class _Mirror:
    """What a group writes to this member's store goes to the others', and theirs comes here."""

    def __init__(self, store: Any, board: Board, tag: str) -> None:
        self._store, self._board, self._tag = store, board, f"{tag}/"
        self._known: set[str] = set()

    def publish(self) -> None:
        for key in set(self._store.list_keys()) - self._known:
            self._known.add(key)
            self._board.write(self._tag + key, self._store.get(key))

    def exchange(self) -> None:
        self.publish()
        for name, value in self._board.look(_LOOK).items():
            key = name.removeprefix(self._tag)
            if key != name and key not in self._known:
                self._known.add(key)
                self._store.set(key, value)


def gloo_group(
    store: Any,
    host: str,
    rank: int,
    size: int,
    limit: timedelta,
    meanwhile: Callable[[], None] = lambda: time.sleep(_LOOK),
) -> Any:
    """A raw gloo group over ``store``, on the interface that reaches ``host``; collective.

    Formed on a thread that is left alone at the deadline: gloo goes on knocking at a member that
    has given up for five times its timeout.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_address(host))]
    options._timeout = limit
    make = partial(dist.ProcessGroupGloo, store, rank, size, options)
    del options  # an error's frames would keep the sockets open
    return _formed(make, limit, meanwhile)


def _nccl(store: Any, rank: int, size: int, limit: timedelta) -> Callable[[], Any]:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 4 * limit + timedelta(seconds=60)  # our own deadlines speak first
    device = torch.device("cuda", torch.cuda.current_device())

    def make() -> Any:
        with torch.cuda.device(device):
            group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
            # Now, while the store is mirrored: the communicator's id goes through it.
            group.eager_connect_single_device(device)
        return group

    return make


def _formed(make: Callable[[], Any], limit: timedelta, meanwhile: Callable[[], None]) -> Any:
    """What ``make`` returns on a thread of its own, while ``meanwhile`` is called again and again.

    ``RuntimeError`` where it takes longer than ``limit``.
    """
    made: Future[Any] = Future()
    NativeThread("rollout-group", partial(_form, made, make)).start()
    deadline = time.monotonic() + limit.total_seconds() + _SLACK
    try:
        while not made.done():
            if time.monotonic() > deadline:
                raise RuntimeError("timed out connecting to the other members")
            meanwhile()
        return made.result()
    finally:
        del made, make  # an error's frames would keep the sockets open


def _form(made: Future[Any], make: Callable[[], Any]) -> None:
    try:
        made.set_result(make())
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        made.set_exception(error.with_traceback(None))


def host_port(host: str, port: int) -> str:
    """As addresses are written: with brackets where ``host`` is one of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether other hosts cannot reach what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """``ConfigError`` where this machine's card has no arithmetic of that dtype."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return
    card = torch.cuda.get_device_properties(device)
    if (card.major, card.minor) < BFLOAT16:
        raise ConfigError(
            "Bfloat16 is only supported on GPUs with compute capability of at least "
            f"{'.'.join(map(str, BFLOAT16))}. Your {card.name} GPU has compute capability "
            f"{card.major}.{card.minor}; use dtype='float16' (--dtype half), or float32"
        )


def choose_device(device: str) -> torch.device:
    """``auto`` is CUDA when present; a named device that is missing is a ConfigError."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda' was asked for but no CUDA device is available; use 'cpu'")
    return torch.device(device)
