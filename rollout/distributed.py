"""Process groups without process-global state: tensor parallelism, rendezvous, devices.

Groups are raw backend objects (``ProcessGroupGloo`` / ``ProcessGroupNCCL``), so forming one never
touches ``torch.distributed``'s default group of the job it is formed in. Rendezvous listens on a
socket bound here (``TCPStore`` alone would bind every interface), on loopback unless told
otherwise, and every key carries a secret that travelled over the control channel.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.errors import ConfigError, DeadlineExceeded, TransferFailed

LOOPBACK = "127.0.0.1"

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


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the members of a group meet: plain values that travel over the control channel."""

    host: str
    port: int
    secret: str
    size: int
    backend: str  # gloo | nccl


class RendezvousServer:
    """The listening side of a rendezvous; keep it alive as long as its groups."""

    def __init__(self, size: int, backend: str, host: str = LOOPBACK, timeout: float = 30.0):
        listener = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            listener.bind((host, 0))
            listener.listen(size + 8)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on {host} for the weight group: {error}") from error
        port = listener.getsockname()[1]
        self.info = Rendezvous(host, port, secrets.token_hex(16), size, backend)
        self._store: Any = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        self._store = None


_SLACK = 0.5  # seconds in which gloo's own timeout may speak first


def join_group(
    where: Rendezvous, rank: int, timeout: float, *, tag: str = "0", device: str = "cpu"
) -> Any:
    """Form the group together with all ``where.size`` members; returns the raw process group.

    Collective: every member calls it with its own ``rank`` and the same ``tag`` within ``timeout``
    seconds. Raises ``TransferFailed`` or ``DeadlineExceeded`` naming the place.
    """
    limit = timedelta(seconds=timeout)
    _probe(where, rank, timeout)
    try:
        tcp = dist.TCPStore(
            where.host, where.port, is_master=False, wait_for_workers=False, timeout=limit
        )
        store = dist.PrefixStore(f"{where.secret}/{tag}", tcp)
        if where.backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = limit
            return dist.ProcessGroupNCCL(store, rank, where.size, nccl)
        return gloo_group(store, where.host, rank, where.size, limit)
    except (RuntimeError, dist.DistError) as error:
        place = f"rank {rank} of {where.size} at {where.host}:{where.port}"
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            raise DeadlineExceeded(
                f"{place}: the group did not form within {timeout:g} s; are all members up?"
            ) from error
        raise TransferFailed(f"{place}: the group did not form: {error}") from error


def gloo_group(store: Any, host: str, rank: int, size: int, limit: timedelta) -> Any:
    """A raw gloo group over ``store``, on the interface that reaches ``host``; collective.

    Formed on a thread that is left alone at the deadline: gloo goes on knocking at a member that
    has given up for five times its timeout.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_address(host))]
    options._timeout = limit
    made: Future[Any] = Future()
    forming = (made, store, rank, size, options)
    threading.Thread(target=_form, args=forming, name="rollout-group", daemon=True).start()
    try:
        return made.result(limit.total_seconds() + _SLACK)
    except TimeoutError:
        raise RuntimeError("timed out connecting to the other members") from None
    finally:
        del made, forming, options  # an error's frames would keep the sockets open


def _form(made: Future[Any], store: Any, rank: int, size: int, options: Any) -> None:
    try:
        made.set_result(dist.ProcessGroupGloo(store, rank, size, options))
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        made.set_exception(error.with_traceback(None))


def _probe(where: Rendezvous, rank: int, timeout: float) -> None:
    """Fail at once when nobody listens: a store would retry a refused port until its deadline.

    The socket is bound before the place is announced, so a refusal means that its owner is gone.
    """
    try:
        with socket.create_connection((where.host, where.port), timeout):
            pass
    except OSError as error:
        raise TransferFailed(
            f"rank {rank} of {where.size}: nobody listens at {where.host}:{where.port}; "
            f"the peer that announced it is gone ({error})"
        ) from error


def local_address(host: str) -> str:
    """The address of this machine on the interface that reaches ``host``."""
    if host in ("localhost", LOOPBACK, "::1"):
        return LOOPBACK
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def choose_device(device: str) -> torch.device:
    """``auto`` is CUDA when present; a named device that is missing is a ConfigError."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda' was asked for but no CUDA device is available; use 'cpu'")
    return torch.device(device)
