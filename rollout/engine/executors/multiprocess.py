"""Every rank in a process of its own, reached over a socket pair in our wire format."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from torch import Tensor

from rollout.config import EngineConfig
from rollout.distributed import LOOPBACK, RendezvousServer, choose_device
from rollout.engine.executors.rank_link import RankLink, fail
from rollout.engine.steps.shared_payloads import PayloadMemory
from rollout.engine.steps.step_ring import StepFuture, StepRing
from rollout.engine.worker.shared_memory_group import close_shared, create_shared
from rollout.errors import DeadlineExceeded, EngineClosed, WorkerDied
from rollout.wire.codec import to_plain
from rollout.wire.frames import Frame, Reply, encode

INSTANCE = "ROLLOUT_INSTANCE_ID"  # in the environment of every rank: which engine it is of
_CLOSE_WAIT = 2.0  # seconds for a rank to end by itself


class MultiprocessExecutor:
    """Ranks as subprocesses of ``python -m rollout.engine.worker``.

    One lock makes the order of calls the same on every rank. When a rank ends, all others are
    killed, every pending future fails with ``WorkerDied`` naming the one that ended, and
    ``on_death`` is called once. On CPU the ranks' collectives go through memory they share, and
    on one host so do steps.
    """

    runs_here = False
    one_host = True

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.num_ranks
        self.on_death: Callable[[WorkerDied], None] | None = None
        self.instance = os.environ.get(INSTANCE) or secrets.token_hex(8)
        self._config = config
        self._host = LOOPBACK  # where the ranks meet to form their group
        self._links: list[RankLink] = []
        self._payloads = PayloadMemory()
        self._rendezvous: RendezvousServer | None = None
        self._order_lock = threading.Lock()
        self._state_lock = threading.Lock()
        self._next_id = self._turn = 0
        self._ring: StepRing | None = None
        self._dead: WorkerDied | None = None
        self._closed = False

    def start(self) -> None:
        """Start all ranks and load; raises the first error of any rank and leaves none behind."""
        config = self._config
        deadline = time.monotonic() + config.start_timeout
        try:
            args: dict[str, Any] = {}
            if self.size > 1:
                backend = "nccl" if self._on_gpus() else "gloo"
                self._rendezvous = RendezvousServer(self.size, backend, self._host)
                args["rendezvous"] = to_plain(self._rendezvous.info)
            self._spawn()
            at_once = config.max_parallel_loading_workers or self.size
            for first in range(0, self.size, at_once):
                loading = list(range(first, min(first + at_once, self.size)))
                self._load({**args, "ranks": loading}, deadline)
            if self._ring is not None:
                self._ring.begin()
        except BaseException:
            self.close()
            for late in (self._rendezvous, self._ring):  # made after a ``close`` that came early
                if late is not None:
                    late.close()
            raise

    def _load(self, args: Mapping[str, Any], deadline: float) -> None:
        """Have these ranks load, and wait for them; all form their group at the first call."""
        futures = self.call("start", args)
        done, silent = wait(futures, max(0.0, deadline - time.monotonic()), FIRST_EXCEPTION)
        for future in done:
            future.result()
        if silent:
            ranks = ", ".join(str(i) for i, f in enumerate(futures) if f in silent)
            raise DeadlineExceeded(
                f"rank {ranks} did not load its model within start_timeout="
                f"{self._config.start_timeout:g} s (phase: start)"
            )

    def call(
        self, method: str, args: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> list[Future[Reply]]:
        """Enqueue one call on every rank; never blocks. ``tensors`` stay unchanged until the
        replies are there. After a death every future fails with ``WorkerDied``.
        """
        ring = self._ring if method == "step" else None
        futures = [self._future(ring) for _ in range(self.size)]
        fits = ring is not None and ring.takes(tensors)
        placed = self._payloads.place(tensors) if tensors and not fits else None
        try:
            with self._order_lock:
                self._next_id += 1
                turn = 0 if method.startswith("stage_") else self._turn + 1
                header = {"id": self._next_id, "method": method, "args": dict(args), "turn": turn}
                if placed is not None:
                    header["shared"] = placed[0]
                inside = tensors if tensors and placed is None else {}
                for link, future in zip(self._links, futures, strict=False):
                    link.expect(self._next_id, future)
                if ring is None or not ring.put(turn, header, inside):
                    buffers = encode(header, inside)
                    for link in self._links:
                        link.send(buffers)
                self._turn = turn or self._turn
        except BaseException:
            if placed is not None and placed[1] is not None:
                self._payloads.free(placed[1])
            raise
        if tensors and placed is not None:
            self._payloads.free_after(futures, placed[1], tensors)
        with self._state_lock:
            over = self._dead or (EngineClosed("the engine is closed") if self._closed else None)
        if over is not None:  # it may have ended between our look and our send
            self._fail_pending(over)
            for future in futures:
                fail(future, over)
        return futures

    def _future(self, ring: StepRing | None) -> Future[Reply]:
        if ring is None or not ring.in_use:
            return Future()

        def read(done: Callable[[], bool], timeout: float | None) -> None:
            ring.wait_until(done, timeout, self._take_reply)

        return StepFuture(read)

    def _take_reply(self, rank: int, frame: Frame) -> None:
        self._links[rank].resolve(*frame)

    def _wake(self) -> None:
        """Something came by a socket: who waits for a step may have waited for that."""
        if self._ring is not None:
            self._ring.wake()

    def buffer(self, nbytes: int) -> Tensor | None:
        return self._payloads.buffer(nbytes)

    def close(self) -> None:
        """End every rank within bounded time; pending futures fail with ``EngineClosed``."""
        with self._state_lock:
            if self._closed:
                return
            self._closed = True
        for link in self._links:
            link.hang_up()
        deadline = time.monotonic() + _CLOSE_WAIT
        for link in self._links:
            link.reap(max(0.0, deadline - time.monotonic()))
        self._fail_pending(EngineClosed("the engine was shut down"))
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._payloads.close()
        if self._ring is not None:
            self._ring.close()

    def _spawn(self) -> None:
        shared = [] if self._on_gpus() else self._make_shared()
        self._make_ring()
        try:
            self._spawn_all(shared)
        finally:
            close_shared(shared)  # each rank has its own by now

    def _make_shared(self) -> list[int | None]:
        """Descriptors of memory for the collectives of each stage, as far as there is such."""
        each = self._config.tensor_parallel_size
        return [create_shared(each) for _ in range(self.size // each if each > 1 else 0)]

    def _make_ring(self) -> None:
        each = 1 if self._on_gpus() else self._config.resolved_num_threads
        self._ring = StepRing.make(self.size, self.size * each)

    def _spawn_all(self, shared: Sequence[int | None]) -> None:
        """``shared``: by stage, as of ``_make_shared``."""
        config = self._config
        threads = config.resolved_num_threads
        for rank in range(self.size):
            stage = rank // config.tensor_parallel_size
            shared_fd = shared[stage] if shared else None
            with self._state_lock:  # ``close`` sees every rank, or none starts after it
                if self._closed:
                    raise EngineClosed("the engine was closed while it started")
                link = self._link(rank, shared_fd)
                self._links.append(link)
            first = {
                "rank": rank,
                "size": self.size,
                "num_threads": threads,
                "config": config.to_dict(),
                **self._told(shared_fd),
            }
            link.send(encode(first))

    def _on_gpus(self) -> bool:
        return choose_device(self._config.device).type == "cuda"

    def _link(self, rank: int, shared_fd: int | None) -> RankLink:
        settings = {
            "OMP_NUM_THREADS": str(self._config.resolved_num_threads),
            INSTANCE: self.instance,
        }
        inherited = {
            "--shared-fd": shared_fd,
            "--payload-fd": self._payloads.fd,
            "--steps-fd": self._steps_fd,
        }
        return RankLink.start(rank, settings, self._rank_ended, self._wake, inherited)

    @property
    def _steps_fd(self) -> int | None:
        return None if self._ring is None else self._ring.fd

    def _told(self, shared_fd: int | None) -> dict[str, Any]:
        """What else a rank's first frame says."""
        return {}

    def _rank_ended(self, how: str) -> None:
        """A rank's process or socket is gone; called from that rank's reader thread."""
        with self._state_lock:
            first = not self._closed and self._dead is None
            if first:
                self._dead = WorkerDied(f"{how}; the engine must be started again")
        if not first:
            return
        assert self._dead is not None
        for link in self._links:
            link.blame.set()
            link.kill()
        self._fail_pending(self._dead)
        if self.on_death is not None:
            self.on_death(self._dead)

    def _fail_pending(self, error: Exception) -> None:
        for link in self._links:
            for future in link.take_pending():
                fail(future, error)
        self._wake()
