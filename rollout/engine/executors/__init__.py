"""How the engine reaches its ranks: one ordered stream of calls to all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from contextlib import suppress
from typing import Any, Protocol

from torch import Tensor

from rollout.config import EngineConfig
from rollout.errors import ConfigError, DeadlineExceeded, WorkerDied
from rollout.wire.frames import Reply


class Executor(Protocol):
    """Ranks behind one interface. ``call`` is thread-safe: all ranks see all calls in one order.

    A rank executes calls in that order on its main thread; ``stage_*`` methods are handed, in the
    same order, to its staging thread, so that steps go on beside them. A reply is JSON-able values
    and tensors. A failed call's future raises the rank's error; a dead rank fails every pending
    future with ``WorkerDied``, at once, and calls ``on_death`` once, from an executor thread.
    """

    size: int
    runs_here: bool  # the only rank is in this process, and reads memory of its callers
    one_host: bool  # all ranks can map what processes of this machine and user share
    on_death: Callable[[WorkerDied], None] | None

    def start(self) -> None:
        """Start all ranks and wait until each answers, within ``start_timeout``."""
        ...

    def call(
        self, method: str, args: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> list[Future[Reply]]:
        """Enqueue one call on every rank; futures in rank order."""
        ...

    def buffer(self, nbytes: int) -> Tensor | None:
        """Memory, uint8 [nbytes], from which a tensor reaches the ranks without a copy.

        It is the caller's as long as anybody has it. None where any memory does.
        """
        ...

    def close(self) -> None:
        """End every rank; leaves no process, port or file. Idempotent."""
        ...


def make_executor(config: EngineConfig) -> Executor:
    """The executor that ``config`` names; ``auto`` is inline for one rank, else multiprocess."""
    _check_ray(config)
    if config.resolved_executor == "inline":
        from rollout.engine.executors.inline import InlineExecutor

        return InlineExecutor(config)
    if config.resolved_executor == "external":
        raise ConfigError(
            "executor='external' runs ranks in processes that are there already: call "
            "Rollout.from_ranks in each of them"
        )
    if config.resolved_executor == "ray":
        from rollout.engine.executors.ray import RayExecutor

        return RayExecutor(config)
    from rollout.engine.executors.multiprocess import MultiprocessExecutor

    return MultiprocessExecutor(config)


def _check_ray(config: EngineConfig) -> None:
    """Here and not in the settings: a fleet on Ray has engines with executors of their own."""
    for name in ("ray_address", "ray_placement_group"):
        value = getattr(config, name)
        if value is not None and config.resolved_executor != "ray":
            raise ConfigError(
                f"{name}={value!r} is of executor='ray' alone: set that, too, or leave it out"
            )


def settled(futures: Sequence[Future[Reply]], timeout: float) -> bool:
    """Wait until all of them have a reply or an error; whether that was within ``timeout`` s."""
    deadline = time.monotonic() + timeout
    for future in futures:
        with suppress(TimeoutError, CancelledError):
            future.exception(max(0.0, deadline - time.monotonic()))
    return all(future.done() for future in futures)


def gather_replies(futures: Sequence[Future[Reply]], phase: str, timeout: float) -> list[Reply]:
    """Every rank's answer, by rank; a rank's error wins over another rank's silence, at once.

    ``DeadlineExceeded`` names the ranks that are silent, and the ``phase``.
    """
    wait(futures, timeout, FIRST_EXCEPTION)
    return replies_by_now(futures, phase, timeout)


def replies_by_now(futures: Sequence[Future[Reply]], phase: str, timeout: float) -> list[Reply]:
    """As ``gather_replies``, once ``timeout`` seconds have been waited."""
    done = [future.done() for future in futures]
    for future, ended in zip(futures, done, strict=True):
        if ended and (error := future.exception()) is not None:
            raise error
    silent = [rank for rank, ended in enumerate(done) if not ended]
    if silent:
        raise DeadlineExceeded(
            f"rank {', '.join(map(str, silent))} did not answer within {timeout:g} s "
            f"(phase: {phase})"
        )
    return [future.result() for future in futures]
