"""One rank in this process: no subprocess, no socket, no copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.distributed import TensorParallel
from rollout.distributed.futures import resolve
from rollout.engine.worker.job_thread import JobThread
from rollout.engine.worker.worker import Worker
from rollout.errors import ConfigError, EngineClosed, WorkerDied
from rollout.wire.frames import Reply

_CLOSE_WAIT = 2.0  # seconds for a stage call under way to end


class InlineExecutor:
    """Runs a call in the thread that makes it, under one lock; stage calls on a thread of theirs.

    Where steps are begun ahead, calls run on a thread of the rank's, and a step's reply is waited
    for on another, while the next one begins.

    ``on_death`` is never called: the rank lives as long as this process.
    """

    size = 1
    runs_here = True
    one_host = True

    def __init__(self, config: EngineConfig, device: torch.device | None = None) -> None:
        """``device``: the GPU of a process that is one of several; None: the first it sees."""
        if config.num_ranks != 1:
            raise ConfigError(
                "the inline executor runs one rank; use executor='multiprocess' for "
                f"{config.num_ranks}"
            )
        self.on_death: Callable[[WorkerDied], None] | None = None
        self._config = config
        worker = Worker(config, TensorParallel(), device=device)
        self._worker: Worker | None = worker
        self._staging = JobThread("rollout-staging")
        ahead = config.runs_ahead(worker.device.type)
        self._main = JobThread("rollout-rank") if ahead else None
        self._replies = JobThread("rollout-replies")
        self._lock = threading.Lock()

    def start(self) -> None:
        """Load the model here; raises what loading raises."""
        if self._config.num_threads is not None:
            torch.set_num_threads(self._config.num_threads)
        self.call("start", {})[0].result()

    def call(
        self, method: str, args: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> list[Future[Reply]]:
        """The call's future; done already where calls run in the thread that makes them."""
        future: Future[Reply] = Future()
        worker = self._worker
        thread = self._staging if method.startswith("stage_") else self._main

        def run() -> None:
            assert worker is not None
            if not future.set_running_or_notify_cancel():
                return
            try:
                reply = worker.begin(method, args, tensors or {})
            except Exception as error:  # noqa: BLE001 - belongs to whoever waits for the reply
                future.set_exception(error)
                return
            beside = thread is not None and thread is self._main
            if not (beside and self._replies.submit(lambda: resolve(future, reply))):
                resolve(future, reply)

        if worker is None or (thread is not None and not thread.submit(run)):
            future.set_exception(EngineClosed("the engine is closed"))
        elif thread is None:
            with self._lock:
                run()
        return [future]

    def buffer(self, nbytes: int) -> Tensor | None:
        return None  # the rank reads any memory of this process

    def close(self) -> None:
        """Drop the model; a stage call under way gets a moment to end."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            for thread in (self._staging, self._main, self._replies):
                if thread is not None:
                    thread.close(_CLOSE_WAIT)
