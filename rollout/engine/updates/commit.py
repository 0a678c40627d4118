"""The vote and the commit: what was staged becomes live on all ranks between two steps, or none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout.engine.core import EngineCore
from rollout.engine.executors import gather_replies
from rollout.engine.pins import PinTerms
from rollout.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    EngineBroken,
    RolloutError,
    WeightMismatch,
    WorkerDied,
    some,
)
from rollout.weight_sync.protocol.digests import check_finite, combine, total
from rollout.weight_sync.protocol.messages import Seal, UpdateRequest
from rollout.weight_sync.protocol.receipts import (
    AdapterReceipt,
    ComponentReceipt,
    RankReceipt,
    UpdateReceipt,
)
from rollout.weights import TensorMeta
from rollout.weights.components import adapter_component, adapter_of, component_of

T = TypeVar("T")
_LATE = "a commit did not end at its deadline"


def take_votes(
    engine: EngineCore,
    request: UpdateRequest,
    num_buckets: int,
    judge: Callable[[Mapping[str, int]], Seal],
) -> Sealed:
    """Every rank's vote, and ``judge``'s on the digests they hold; either can refuse.

    What the ranks, as they digested it, found to be no number is refused, too; copies count once.
    So are adapters whose scalings, read back from the ranks' slots, are not those of ``request``.
    """
    started = time.perf_counter()
    args = {"update_id": request.update_id, "num_buckets": num_buckets}
    replies = gather_replies(engine.call("stage_seal", args), "seal", request.timeout)
    votes = [reply for reply, _ in replies]
    held = combine([vote["digests"] for vote in votes])
    seal, seconds = judge(held), time.perf_counter() - started
    _check_scalings(request, votes)
    try:
        check_finite(combine([vote["nonfinite"] for vote in votes]))
    except WeightMismatch:
        engine.counters.record_nonfinite()
        raise
    return Sealed(seal, votes, held, seconds)


def _check_scalings(request: UpdateRequest, votes: Sequence[Mapping[str, Any]]) -> None:
    """``ChecksumMismatch`` where a rank's slot has other scalings than were sent."""
    for name, spec in request.adapters.items():
        wanted = spec.scaling_digest
        for rank, vote in enumerate(votes):
            if vote["scalings"].get(name) != wanted:
                raise ChecksumMismatch(
                    f"adapter {name!r}: its scalings arrived changed on rank {rank}; the update "
                    "was refused, send it again"
                )


@dataclass(frozen=True, slots=True)
class Sealed:
    """What all ranks have voted for; ``held``: digest per tensor of all that they will hold."""

    seal: Seal
    votes: list[dict[str, Any]]
    held: dict[str, int]
    seconds: float

    def receipt(
        self, metadata: Mapping[str, TensorMeta], epoch: int, request: UpdateRequest
    ) -> UpdateReceipt:
        """All of the receipt but for the times of the commit."""
        seal = self.seal
        names = [name for name in seal.digests if name in metadata]
        assert request.version is not None
        return UpdateReceipt(
            components=self._components(metadata, names),
            adapters=self._adapters(metadata, names, request),
            version=request.version,
            epoch=epoch,
            digest=total(seal.digests[name] for name in names),
            num_tensors=len(names),
            num_bytes=sum(metadata[name].nbytes for name in names),
            wire_bytes=seal.wire_bytes,
            timings={
                "gather": seal.gather_seconds,
                "transfer": seal.transfer_seconds,
                "stage": max(vote["stage_seconds"] for vote in self.votes),
                "verify": self.seconds,
            },
            ranks=tuple(
                RankReceipt(
                    rank=rank,
                    version=request.version,
                    digest=total(row[3] for row in vote["digests"]),
                    num_bytes=vote["num_bytes"],
                )
                for rank, vote in enumerate(self.votes)
            ),
            update_id=request.update_id,
            transport=request.transport,
            label=request.label,
            details={
                **seal.details,
                **self._quantized(),
                "extra_memory_bytes": str(max(v.get("extra_bytes", 0) for v in self.votes)),
                "rank_digest_seconds": f"{max(v['verify_seconds'] for v in self.votes):.6f}",
            },
        )

    def _components(
        self, metadata: Mapping[str, TensorMeta], names: list[str]
    ) -> dict[str, ComponentReceipt]:
        """What was sent, by component; nothing where the engine has but one."""
        models = {c for c in map(component_of, metadata) if adapter_of(c) is None}
        if len(models) == 1:
            return {}
        parts: dict[str, list[str]] = {}
        for name in names:
            if component_of(name) in models:
                parts.setdefault(component_of(name), []).append(name)
        return {
            component: ComponentReceipt(
                digest=total(self.seal.digests[name] for name in found),
                num_tensors=len(found),
                num_bytes=sum(metadata[name].nbytes for name in found),
            )
            for component, found in parts.items()
        }

    def _adapters(
        self, metadata: Mapping[str, TensorMeta], names: list[str], request: UpdateRequest
    ) -> dict[str, AdapterReceipt]:
        parts: dict[str, list[str]] = {adapter_component(name): [] for name in request.adapters}
        for name in names:
            if (component := component_of(name)) in parts:
                parts[component].append(name)
        return {
            str(adapter_of(component)): AdapterReceipt(
                version=request.adapter_version(str(adapter_of(component))),
                digest=total(self.seal.digests[name] for name in found),
                num_tensors=len(found),
                num_bytes=sum(metadata[name].nbytes for name in found),
            )
            for component, found in parts.items()
        }

    def _quantized(self) -> dict[str, str]:
        """What is live where that is not what was sent: the digest of all codes and scales."""
        scheme = self.votes[0].get("scheme")
        if not scheme:
            return {}
        live = total(combine([vote["quantized"] for vote in self.votes]).values())
        return {"quantization": scheme, "quantized_digest": f"{live:016x}"}


class Switch:
    """Exchanges the two instances of every rank; for the holder of the lease.

    ``held``: digest per tensor of the models that are live, None where that is not known.
    """

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self.held: dict[str, int] | None = None
        self.moved = False  # whether the last commit moved bytes

    def run(
        self,
        request: UpdateRequest | None,
        timeout: float,
        held: dict[str, int] | None,
        *,
        pin: PinTerms | None = None,
        models: bool = True,
        adapters: Collection[str] = (),
        name: Callable[[int], object] = lambda version: None,
    ) -> tuple[float, dict[str, int]]:
        """Make what was staged live on all ranks between two steps, or what was live before
        (no ``request``); returns the stall in seconds, and the digest per tensor of what is live.

        ``held``: what has to be live then, None if that is not known. Where a rank moved bytes for
        it, or nothing was loaded (no ``request``), it is read again before a step can run. Any
        failure takes all ranks back and raises; where that fails too the engine is broken, or it
        has died.

        ``pin``: terms for requests that it pins, None where none can be.
        ``models`` False: no instance changes, and the ranks have nothing to do. ``name`` says
        at that boundary which slots the names of ``adapters`` mean in this version. Weights that
        are broken are not mended by it: ``EngineBroken``.
        """
        base, live = self._engine.base_version, self._engine.version
        given_up = threading.Event()
        version = live + 1 if request is None or request.version is None else request.version
        in_flight = "keep" if request is None else request.in_flight

        def boundary() -> tuple[float, dict[str, int]]:
            started, live = time.perf_counter(), held
            args = {"version": version, "back": request is None}
            # A rank that fails does not say how far it came; without staging, live is overwritten
            # already, and looked at once what was kept has been brought back.
            moved = request is None or request.staging != "none"
            if not models:
                self._engine.check_whole()
                self._engine.on_commit(
                    version, in_flight, models=False, adapters=adapters, name=name
                )
                return time.perf_counter() - started, self.held or {}
            try:
                replies = gather_replies(self._engine.call("commit", args), "commit", timeout)
                moved = any(reply["moved"] for reply, _ in replies)
                self.moved = moved
                if moved or request is None or live is None:
                    live = self._read_live(held, timeout)
                if given_up.is_set():
                    raise EngineBroken(_LATE)
                self._engine.on_commit(version, in_flight, pin, adapters=adapters, name=name)
                if given_up.is_set():  # meanwhile; that mended what was broken by it
                    self._engine.mark_broken(_LATE)
            except Exception as error:
                self._revert(base, timeout, error, moved)
                raise
            return time.perf_counter() - started, live

        return self._at_boundary(boundary, timeout, given_up)

    def _read_live(self, expected: dict[str, int] | None, timeout: float) -> dict[str, int]:
        """Inside a boundary: the digests of what is live, which must be ``expected`` if known."""
        rows = gather_replies(self._engine.call("digests", {}), "digests of a commit", timeout)
        found = combine([reply["digests"] for reply, _ in rows])
        wrong = [name for name in found if expected and found[name] != expected.get(name)]
        if wrong:
            raise ChecksumMismatch(
                f"{len(wrong)} of {len(found)} tensors changed as they were made live: "
                f"{some(wrong)}; all ranks have gone back"
            )
        return found

    def _at_boundary(self, fn: Callable[[], T], timeout: float, given_up: threading.Event) -> T:
        future = self._engine.at_step_boundary(fn)
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
            self._engine.mark_broken(_LATE)
            raise EngineBroken(_LATE) from error

    def _revert(self, base: int, timeout: float, cause: Exception, moved: bool) -> None:
        """Every rank is told to be at ``base`` again; one that never swapped has nothing to do.

        Where bytes were ``moved`` for it, or may have been, what is live is read once more.
        """
        try:
            gather_replies(self._engine.call("revert", {"version": base}), "revert", timeout)
            if moved and self._engine.broken is None:
                self._read_live(self.held, timeout)
        except WorkerDied as death:  # no full update would mend that
            raise WorkerDied(str(death)) from cause
        except Exception as error:  # noqa: BLE001 - whatever a device raises: nobody may generate
            self._engine.mark_broken(f"commit failed ({cause}) and going back failed ({error})")
            raise EngineBroken(f"commit failed ({cause}) and going back failed: {error}") from cause
