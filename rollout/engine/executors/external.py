"""Ranks inside processes that are there already: a trainer's own, one rank in each.

    first process   EngineCore -> ExternalExecutor == sockets ==> RankHost (in this process, too)
    the others                                     == sockets ==> RankHost

Calls, their order and their frames are those of ``multiprocess``. A host is threads beside the
program's own, and nothing of it ends the program: where a rank must leave, its socket closes, and
the executor fails all that is pending with ``WorkerDied``.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch

from rollout.config import EngineConfig
from rollout.distributed.life_lines import closed_in_forks
from rollout.distributed.native_thread import NativeThread
from rollout.distributed.stage import place_of
from rollout.engine.executors.multiprocess import MultiprocessExecutor
from rollout.engine.executors.rank_link import RankLink
from rollout.engine.steps.shared_payloads import PayloadViews
from rollout.engine.steps.step_ring import RankSteps
from rollout.engine.worker.job_thread import JobThread
from rollout.engine.worker.rank_loop import RankLoop
from rollout.engine.worker.shared_memory_group import close_shared
from rollout.engine.worker.worker import Worker
from rollout.errors import RolloutError
from rollout.wire.frames import recv_frame

_CLOSE_WAIT = 2.0  # seconds for what a rank is doing to end

log = logging.getLogger(__name__)


class ExternalExecutor(MultiprocessExecutor):
    """``links``: by rank, sockets of which a ``RankHost`` has the other end; they are its own now.

    ``host``: the address at which the ranks' processes reach this one. ``one_host``: whether they
    are all on this machine, and of this user, so that they can share memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        links: Mapping[int, socket.socket],
        *,
        host: str,
        one_host: bool,
    ) -> None:
        super().__init__(config)
        self._sockets, self._host, self.one_host = dict(links), host, one_host
        self._shared: list[int | None] = []

    def start(self) -> None:
        try:
            super().start()
        finally:
            shared, self._shared = self._shared, []
            close_shared(shared)  # each rank has opened its own by now

    def close(self) -> None:
        super().close()
        for sock in self._sockets.values():  # some have no link where the start has failed
            sock.close()

    def _spawn(self) -> None:
        if not self.one_host:
            self._payloads.close()  # large tensors travel in the frames
        elif not self._on_gpus():
            self._shared = self._make_shared()
        if self.one_host:
            self._make_ring()
        self._spawn_all(self._shared)

    def _link(self, rank: int, shared_fd: int | None) -> RankLink:
        sock = self._sockets[rank]
        sock.settimeout(None)
        return RankLink(rank, sock, self._rank_ended, self._wake)

    def _told(self, shared_fd: int | None) -> dict[str, Any]:
        """Nothing is inherited: the ranks open what is shared by the numbers it has here."""
        fds = {"shared_fd": shared_fd, "payload_fd": self._payloads.fd, "steps_fd": self._steps_fd}
        return {name: _address(fd) for name, fd in fds.items()}


class RankHost:
    """One rank of an engine, on threads of this process.

    Its settings and calls come over ``sock``; it ends when that closes, at ``close``, or when it
    has to leave the other ranks alone. ``device``: that of the process, if not its number's.
    """

    def __init__(self, sock: socket.socket, device: torch.device | None = None) -> None:
        sock.settimeout(None)
        self._sock, self._device = closed_in_forks(sock), device
        self._thread = NativeThread("rollout-rank", self._run, self._hang_up)
        self._thread.start()

    def close(self) -> None:
        """End the rank, within bounded time where it waits for others. Idempotent."""
        self._hang_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_WAIT)

    def wait(self, timeout: float | None = None) -> None:
        """Until the engine has hung up, for at most ``timeout`` seconds."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._serve()
        except (OSError, RolloutError) as error:  # the engine sees the socket close, and says so
            log.error("a rank of the engine in this process has ended: %s", error)
        finally:
            self._hang_up()
            self._sock.close()

    def _serve(self) -> None:
        first = recv_frame(self._sock)
        if first is None:
            return
        said, _ = first
        config = EngineConfig.from_dict(said["config"])
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        rank, size = int(said["rank"]), int(said["size"])
        tp, stage = place_of(rank, config.tensor_parallel_size, config.pipeline_parallel_size)
        worker = Worker(config, tp, _opened(said["shared_fd"]), self._device, stage)
        staging = JobThread("rollout-staging")
        replies = JobThread("rollout-replies") if config.runs_ahead(worker.device.type) else None
        payloads = PayloadViews(_opened(said["payload_fd"]))
        steps = RankSteps.join(_opened(said["steps_fd"]), rank, size)
        try:
            RankLoop(
                *(self._sock, worker, staging, payloads, replies, steps),
                end=lambda _: self._hang_up(),
            ).run()
        finally:
            worker.close()
            for thread in (staging, replies):
                if thread is not None:
                    thread.close(_CLOSE_WAIT)
            payloads.close()

    def _hang_up(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was gone, or it is closed


def _address(fd: int | None) -> list[int] | None:
    """A descriptor of this process as others of its user can open it, and what they must find."""
    if fd is None or sys.platform != "linux":
        return None
    found = os.fstat(fd)
    return [os.getpid(), fd, found.st_dev, found.st_ino]


def _opened(address: list[int] | None) -> int | None:
    """A descriptor of one's own for ``_address``; None where it cannot be had."""
    if address is None:
        return None
    pid, number, device, inode = address
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        log.warning("the ranks share no memory: %s", error)
        return None
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != (device, inode):
        os.close(fd)  # of a process that has this number in another container
        return None
    return fd
