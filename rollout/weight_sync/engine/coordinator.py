"""One engine's side of updates: the lease, the state machine, the vote, the commit.

Holds no weights and moves none: ranks are reached through ``EngineControl.call``, generation
through ``at_step_boundary``. The state machine is drawn in ``protocol/messages.py``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from rollout.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    EngineBroken,
    RolloutError,
    TransferFailed,
    UpdateInProgress,
    VersionConflict,
)
from rollout.weight_sync.engine.begin_check import check_request
from rollout.weight_sync.engine.ended import EndedUpdates
from rollout.weight_sync.protocol import zstd
from rollout.weight_sync.protocol.digests import combine, total
from rollout.weight_sync.protocol.messages import UpdateReceipt, UpdateRequest, WeightInfo
from rollout.weight_sync.transports import offered, served
from rollout.weight_sync.transports.base import Accepted
from rollout.weight_sync.transports.host import host_id
from rollout.weights import TensorMeta
from rollout.wire.frames import Reply

T = TypeVar("T")
KEPT_RECEIPTS = 64
_TWICE = (
    ". This version is a rollback already: it is the engine's, not a collective of the trainer's "
    "ranks, so call rollback() on one of them alone"
)
_UNTIL = {
    "shadow": "until the next update begins",
    "sparse": "until an update without staging begins",
    "host": "until an update without staging begins",
}

log = logging.getLogger(__name__)


class EngineControl(Protocol):
    """What the coordinator needs of the engine; the core implements it."""

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

    def record_update(self, *, failed: bool, stall: float = 0.0) -> None:
        """Count an update that ended; ``stall`` in seconds."""
        ...

    def record_nonfinite(self) -> None:
        """Count an update that is refused for NaN or infinity."""
        ...


class Coordinator:
    """Transactions on one engine's weights. Thread-safe; one update at a time holds the lease."""

    def __init__(
        self,
        engine: EngineControl,
        *,
        metadata: Sequence[TensorMeta],
        aliases: Mapping[str, str],
        device: str,
        num_ranks: int,
        transports: tuple[str, ...] | None = None,
        undo: str = "shadow",
        staging: str = "auto",
        memory: Mapping[str, int] | None = None,
        devices: tuple[str, ...] = (),
    ) -> None:
        self.engine = engine
        self.metadata = {meta.name: meta for meta in metadata}
        self.aliases = dict(aliases)
        self.num_ranks = num_ranks
        self.state = "idle"
        self.undo, self._staging, self._memory = undo, staging, dict(memory or {})
        self._device, self._devices = device, devices
        self._transports = offered() if transports is None else transports
        self._host = host_id()  # the ranks' too: they are children of this process
        self._dtype = next(iter(self.metadata.values())).dtype
        self._label: str | None = None
        self._holder: object = None  # whose turn it is: a ``Lease``; None also of a rollback
        self._free = threading.Condition()
        self.ended = EndedUpdates(KEPT_RECEIPTS)
        self._receipts: deque[UpdateReceipt] = deque(maxlen=KEPT_RECEIPTS)
        self._can_roll_back = False
        # What the ranks voted to hold, by tensor: of the live version and of the one before.
        self._held: dict[str, int] | None = None
        self._held_before: dict[str, int] | None = None

    @property
    def transports(self) -> tuple[str, ...]:
        """What every sender's update may come by."""
        return (*self._transports, *served(self._transports))

    def info(self) -> WeightInfo:
        last = self._receipts[-1].update_id if self._receipts else ""
        return WeightInfo(
            epoch=self.engine.epoch,
            version=self.engine.version,
            label=self._label,
            state="broken" if self.state == "idle" and self.engine.broken else self.state,
            dtype=self._dtype,
            tensors=tuple(self.metadata.values()),
            aliases=self.aliases,
            tensor_parallel_size=self.num_ranks,
            device=self._device,
            transports=self._transports,
            last_update_id=last,
            host=self._host,
            undo=self.undo,
            memory=self._memory,
            zstd=zstd.available(),
            devices=self._devices,
        )

    @property
    def receipts(self) -> tuple[UpdateReceipt, ...]:
        """Of the last commits, oldest first."""
        return tuple(self._receipts)

    def digests(self, timeout: float) -> dict[str, int]:
        """Digest per tensor of the live weights, read on every rank beside generation.

        Of one version: a reading that a commit fell into is thrown away and done again.
        """
        deadline = time.monotonic() + timeout
        while True:
            replies = self.gather("stage_digests", {}, timeout, phase="digest")
            if len({version for reply in replies for version in reply["versions"]}) == 1:
                return combine([reply["digests"] for reply in replies])
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"commits came faster than the weights could be read, for {timeout:g} s"
                )

    def rollback(self, timeout: float) -> UpdateReceipt:
        """Make the version before the last commit live again, as a new version.

        Possible once after a commit: with ``undo="shadow"`` until the next update begins to stage
        over it, else until one goes straight into the live instance; else ``VersionConflict``.
        """
        self.acquire(None, timeout)
        try:
            if not self._can_roll_back:
                again = bool(self._receipts) and self._receipts[-1].transport == "rollback"
                raise VersionConflict(
                    f"version {self.engine.version} has no predecessor in memory; a rollback is "
                    f"possible once after a commit, with undo={self.undo!r} {_UNTIL[self.undo]}"
                    + (_TWICE if again else "")
                )
            started = time.perf_counter()
            version = self.engine.version + 1
            stall, held = self.switch(None, "keep", timeout, self._held_before)
            receipt = UpdateReceipt(
                version=version,
                epoch=self.engine.epoch,
                digest=total(held.values()),
                num_tensors=len(held),
                num_bytes=sum(meta.nbytes for meta in self.metadata.values()),
                wire_bytes=0,
                timings={"stall": stall, "total": time.perf_counter() - started},
                ranks=(),
                transport="rollback",
            )
            labels = [kept.label for kept in self._receipts if kept.version < version - 1]
            self.record(receipt, labels[-1] if labels else None, held)
            return receipt
        finally:
            self.free(None)

    # ---- what a lease uses ----

    def acquire(self, lease: object, timeout: float) -> None:
        """Take the lease, waiting for another to end; ``UpdateInProgress`` at the deadline."""
        with self._free:
            if not self._free.wait_for(lambda: self.state in ("idle", "broken"), timeout):
                raise UpdateInProgress(
                    f"another update ({self.state}) did not end within {timeout:g} s"
                )
            self.state, self._holder = "staging", lease

    def free(self, lease: object, broken: str | None = None) -> None:
        """End the lease; ``broken`` says why live weights are not one version, if so."""
        with self._free:
            if self._holder is not lease:
                return
            try:
                if broken:
                    self.engine.mark_broken(broken)
            finally:
                self._holder = None
                self.state = "idle" if self.engine.broken is None else "broken"
                self._free.notify_all()

    def advance(self, lease: object, state: str) -> None:
        """The next state of the update that holds the lease; ``TransferFailed`` if it has ended."""
        with self._free:
            if self._holder is not lease:
                raise TransferFailed(f"the update ended before it was {state}")
            self.state = state

    def staged_in(self, request: UpdateRequest) -> UpdateRequest:
        """``request`` with "auto" resolved where this engine has set no memory aside for a shadow.

        Then an update goes straight into what is live, as the engine was started to. A delta needs
        a shadow: ``VersionConflict``, upon which its sender sends everything.
        """
        if request.staging != "auto" or self._staging != "none":
            return request
        if request.encoding == "delta":
            raise VersionConflict("the engine was started with staging='none': send a full update")
        return replace(request, staging="none")

    def staging_begins(self, request: UpdateRequest) -> None:
        """Ranks are about to overwrite their shadow, or (staging "none") what is live."""
        if self.undo == "shadow" or request.staging == "none":
            self._can_roll_back = False

    def restore(self, timeout: float) -> str | None:
        """After an update failed that went into the live instances: bring all back to before it.

        None when they are, else why not. For an ``undo`` that has kept what was live.
        """
        try:
            self.gather("stage_restore", {}, timeout, phase="restore")
            if self._held is not None and self.digests(timeout) != self._held:
                return "what was kept of them is damaged"
        except Exception as error:  # noqa: BLE001 - whatever a device raises: nobody may generate
            return str(error)
        return None

    def check_fields(self, request: UpdateRequest, transports: tuple[str, ...]) -> Accepted:
        """Raise what is wrong with the request itself, whatever is live; needs no lease."""
        return check_request(
            request,
            transports=transports,
            num_ranks=self.num_ranks,
            device=self._device,
            wanted=self.metadata,
            aliases=self.aliases,
        )

    def check(self, request: UpdateRequest) -> int:
        """The version the update will have on what is live; for the holder of the lease."""
        live = (self.engine.epoch, self.engine.version)
        if request.base is not None and tuple(request.base) != live:
            raise VersionConflict(
                f"built on (epoch, version) {tuple(request.base)}, but {live} is live"
            )
        version = request.version if request.version is not None else live[1] + 1
        if version <= live[1]:
            raise VersionConflict(f"version {version} is not above the live version {live[1]}")
        if (request.partial or request.encoding == "delta") and self.engine.broken is not None:
            raise EngineBroken("live weights are not one version: send a full update")
        return version

    def gather(
        self, method: str, args: Mapping[str, Any], timeout: float, *, phase: str
    ) -> list[dict[str, Any]]:
        """Call every rank and wait for all; the first error names its rank."""
        futures = self.engine.call(method, args)
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

    def switch(
        self,
        request: UpdateRequest | None,
        in_flight: str,
        timeout: float,
        held: dict[str, int] | None,
    ) -> tuple[float, dict[str, int]]:
        """Make what was staged live on all ranks between two steps, or what was live before
        (no ``request``); returns the stall in seconds, and the digest per tensor of what is live.

        ``held``: what has to be live then, None if that is not known. Where a rank moved bytes for
        it, or nothing was loaded (no ``request``), it is read again before a step can run. Any
        failure takes all ranks back and raises; where that fails too the engine is broken.
        """
        base = self.engine.version
        given_up = threading.Event()
        version = base + 1 if request is None or request.version is None else request.version

        def boundary() -> tuple[float, dict[str, int]]:
            started, live = time.perf_counter(), held
            args = {"version": version, "back": request is None}
            # A rank that fails does not say how far it came; without staging, live is overwritten
            # already, and looked at once what was kept has been brought back.
            moved = request is None or request.staging != "none"
            try:
                replies = self.await_all(self.engine.call("commit", args), timeout, "commit")
                moved = any(reply["moved"] for reply, _ in replies)
                if moved or request is None or live is None:
                    live = self._read_live(held, timeout)
                if given_up.is_set():
                    raise EngineBroken("the commit did not end at its deadline")
                self.engine.on_commit(version, in_flight)
            except Exception as error:
                self._revert(base, timeout, error, moved)
                raise
            return time.perf_counter() - started, live

        return self._at_boundary(boundary, timeout, given_up)

    def _read_live(self, expected: dict[str, int] | None, timeout: float) -> dict[str, int]:
        """Inside a boundary: the digests of what is live, which must be ``expected`` if known."""
        rows = self.gather("digests", {}, timeout, phase="digests of a commit")
        found = combine([reply["digests"] for reply in rows])
        wrong = [name for name in found if expected and found[name] != expected.get(name)]
        if wrong:
            raise ChecksumMismatch(
                f"{len(wrong)} of {len(found)} tensors changed as they were made live: "
                f"{', '.join(wrong[:8])}; all ranks have gone back"
            )
        return found

    def record(
        self,
        receipt: UpdateReceipt,
        label: str | None,
        held: dict[str, int],
        reversible: bool = False,
    ) -> None:
        """Remember a commit; ``held``: digest per tensor of all that is live now."""
        log.info(
            "version %d is live: %s, %d tensors by %s, stalled %.4f s",
            *(receipt.version, receipt.update_id or "rolled back", receipt.num_tensors),
            *(receipt.transport, receipt.timings.get("stall", 0.0)),
        )
        self._receipts.append(receipt)
        self._held_before, self._held = self._held, held
        self._label = label
        self._can_roll_back = reversible
        self.engine.mark_broken(None)
        self.engine.record_update(failed=False, stall=receipt.timings.get("stall", 0.0))

    def _at_boundary(self, fn: Callable[[], T], timeout: float, given_up: threading.Event) -> T:
        future = self.engine.at_step_boundary(fn)
        try:
            # A step may be under way, and the commit itself has this deadline too.
            return future.result(2 * timeout)
        except FutureTimeout as error:
            if isinstance(error, RolloutError):
                raise
            if future.cancel():
                raise DeadlineExceeded(
                    f"no step boundary came within {2 * timeout:g} s (phase: commit)"
                ) from error
        try:
            # Under way: the commit, its digests, or going back from it, each with its deadline.
            return future.result(4 * timeout)
        except FutureTimeout as error:
            if isinstance(error, RolloutError):
                raise
            given_up.set()  # it is too late for that version: nobody will hear of it
            self.engine.mark_broken("a commit did not end at its deadline")
            raise EngineBroken("the commit did not end at its deadline") from error

    def _revert(self, base: int, timeout: float, cause: Exception, moved: bool) -> None:
        """Every rank is told to be at ``base`` again; one that never swapped has nothing to do.

        Where bytes were ``moved`` for it, or may have been, what is live is read once more.
        """
        try:
            self.await_all(self.engine.call("revert", {"version": base}), timeout, "revert")
            if moved and self.engine.broken is None:
                self._read_live(self._held, timeout)
        except Exception as error:  # noqa: BLE001 - whatever a device raises: nobody may generate
            self.engine.mark_broken(f"commit failed ({cause}) and going back failed ({error})")
            raise EngineBroken(f"commit failed ({cause}) and going back failed: {error}") from cause
