"""What updates need of the engine around them, and calls to all its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Protocol, TypeVar

from torch import Tensor

from rollout.errors import DeadlineExceeded
from rollout.wire.frames import Reply

T = TypeVar("T")


class EngineControl(Protocol):
    """What a coordinator needs of the engine; the core implements it."""

    epoch: int
    version: int

    @property
    def broken(self) -> str | None:
        """Why live weights are not one version, if so."""
        ...

    def call(
        self, method: str, args: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> list[Future[Reply]]: ...

    def room(self, nbytes: int) -> Tensor | None:
        """Memory from which a tensor of a call reaches the ranks without a copy, if there is."""
        ...

    def at_step_boundary(self, fn: Callable[[], T]) -> Future[T]:
        """Run ``fn`` between two steps, on the thread that drives them."""
        ...

    def on_commit(self, version: int, in_flight: str) -> None:
        """Inside a boundary: later tokens are ``version``'s; apply ``in_flight``.

        Where it raises, ``version`` is what it was: the ranks go back, too.
        """
        ...

    def drain(self, timeout: float) -> None:
        """Return when no request runs and none is admitted until the next commit or abort."""
        ...

    def undrain(self) -> None: ...

    def hold(self, timeout: float) -> None:
        """Stop stepping (staging="none"); ``release`` goes on."""
        ...

    def release(self) -> None: ...

    def mark_broken(self, reason: str | None) -> None:
        """Refuse generation until called with None."""
        ...

    def record_update(self, stall: float) -> None:
        """Count an update that was committed; ``stall`` in seconds."""
        ...

    def record_failed_update(self, update_id: str, reason: str) -> None:
        """Count an update that had begun and was not committed."""
        ...

    def record_nonfinite(self) -> None:
        """Count an update that is refused for NaN or infinity."""
        ...


class Ranks:
    """All ranks of an engine, asked at once."""

    def __init__(self, engine: EngineControl) -> None:
        self._engine = engine

    def gather(
        self, method: str, args: Mapping[str, Any], timeout: float, *, phase: str
    ) -> list[dict[str, Any]]:
        """Call every rank and wait for all; the first error names its rank."""
        futures = self._engine.call(method, args)
        return [reply for reply, _ in self.await_all(futures, timeout, phase)]

    def await_all(
        self, futures: Sequence[Future[Reply]], timeout: float, phase: str
    ) -> list[Reply]:
        """Every rank's reply; a rank's error wins over another rank's silence, at once."""
        done, _ = wait(futures, timeout, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future in done and (error := future.exception()) is not None:
                raise error
        silent = [rank for rank, future in enumerate(futures) if future not in done]
        if silent:
            raise DeadlineExceeded(
                f"rank {', '.join(map(str, silent))} did not answer within {timeout:g} s "
                f"(phase: {phase})"
            )
        return [future.result() for future in futures]
