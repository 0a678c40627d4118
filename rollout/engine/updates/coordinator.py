"""One engine's side of updates: what it accepts, what it has committed, what is decided.

Holds no weights and moves none: ranks are reached through ``EngineCore.call``, generation
through ``at_step_boundary``. The state machine is drawn in ``protocol/messages.py``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from rollout.engine.core import EngineCore
from rollout.engine.executors import gather_replies
from rollout.engine.pins import PinTerms
from rollout.engine.serving_lease import LEAVING
from rollout.engine.updates.adapters import AdapterUpdates
from rollout.engine.updates.begin_check import check_request
from rollout.engine.updates.commit import Switch
from rollout.engine.updates.ended import EndedUpdates
from rollout.engine.updates.limits import Foreseen, UpdateLimits
from rollout.engine.updates.served_weights import ServedWeights
from rollout.engine.updates.turn import Prepared, Turn
from rollout.engine.worker.weight_instances import PARKED
from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineBroken,
    EngineClosed,
    VersionConflict,
)
from rollout.weight_sync.protocol import zstd
from rollout.weight_sync.protocol.adapters import adapter_tensors, check_merged, check_room
from rollout.weight_sync.protocol.digests import combine
from rollout.weight_sync.protocol.label import check_label
from rollout.weight_sync.protocol.messages import Decision, UpdateRequest, WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.protocol.version_number import next_version
from rollout.weight_sync.transports import offered, served
from rollout.weight_sync.transports.base import Accepted
from rollout.weight_sync.transports.host import host_id
from rollout.weights import TensorMeta
from rollout.weights.adapters import AdapterSpec
from rollout.weights.components import POLICY
from rollout.weights.wanted import WantedWeights, by_name

KEPT_RECEIPTS = 64
_LOOK = 0.05  # seconds between two looks at whether a sender that waits is still there
_END_OF_PINS = 30.0  # seconds for a step under way to end
log = logging.getLogger(__name__)


class Coordinator:
    """Transactions on one engine's weights. Thread-safe; one at a time has its ``turn``."""

    def __init__(
        self,
        engine: EngineCore,
        served: ServedWeights,
        note_version: Callable[[int, Mapping[str, int], Mapping[str, int]], None] | None = None,
    ) -> None:
        """``note_version`` is told of every version that goes live, with its digests by tensor and
        those of adapters.
        """
        self.engine, self.served, self.switch = engine, served, Switch(engine)
        self.adapters = AdapterUpdates(engine)
        self._transports = offered(served.device)
        self._host = host_id() if engine.one_host else ""  # that of all ranks
        self.limits, self._note_version = UpdateLimits(), note_version
        self._label: str | None = None
        self.label_before: str | None = None  # of the version before the live one
        self.turn = Turn(engine)
        self._last_wanted: tuple[Mapping[str, AdapterSpec], dict[str, TensorMeta]] = {}, {}
        self._decision_lock = threading.Lock()
        self.ended = EndedUpdates(KEPT_RECEIPTS)
        self._receipts: deque[UpdateReceipt] = deque(maxlen=KEPT_RECEIPTS)
        self._committed: dict[int, float] = {}  # version -> when, by time.monotonic()
        self.can_roll_back = self.models_changed = False  # by the last commit
        self.fence = 0  # the highest epoch of a deciding coordinator that was seen, of one fleet
        self._fleet = 0
        self._fence_before: int | None = None  # ``prepare``, unless one was noted since
        # What the ranks voted to hold, by tensor, of the version before the live one.
        self.held_before: dict[str, int] | None = None
        self.merged: tuple[str, ...] = ()  # see ``WeightInfo``; and of the version before
        self.merged_before: tuple[str, ...] = ()

    @property
    def transports(self) -> tuple[str, ...]:
        """The ones that every sender may use."""
        return (*self._transports, *served(self._transports))

    def info(self) -> WeightInfo:
        turn, served, wanted = self.turn, self.served, self.served.wanted
        last = self._receipts[-1].update_id if self._receipts else ""
        return WeightInfo(
            epoch=self.engine.epoch,
            version=self.engine.version,
            label=self._label,
            state=self._state,
            dtype=wanted.dtype,
            tensors=tuple(wanted.tensors.values()),
            components=wanted.components,
            aliases=wanted.aliases,
            tensor_parallel_size=served.tensor_parallel_size,
            pipeline_parallel_size=served.pipeline_parallel_size,
            device=served.device,
            transports=self._transports,
            last_update_id=last,
            host=self._host,
            undo=served.undo,
            memory=served.memory,
            zstd=zstd.available(),
            devices=served.devices,
            reaches=served.reaches,
            prepared="" if turn.prepared is None else turn.prepared.update_id,
            fence=self.fence,
            prefixes=wanted.prefixes,
            spelled=tuple(wanted.spelled),
            grid=served.grid,
            quantized=served.quantized,
            max_adapters=served.max_adapters,
            max_lora_rank=served.max_lora_rank,
            adapters=self.engine.adapters.versions,
            adapter_digests=self.adapters.digests,
            merged=self.merged,
            numerics=served.numerics,
        )

    @property
    def _state(self) -> str:
        if self.turn.state not in ("idle", "broken"):
            return self.turn.state
        if self.engine.state == "dead":
            return "dead"
        return "broken" if self.engine.broken else self.turn.state

    def wanted(self, request: UpdateRequest) -> WantedWeights:
        """All that may be sent in an update: the models' tensors, and its adapters'.

        ``WeightMismatch`` names what an adapter changes that the model has not.
        """
        models, (asked, found) = self.served.wanted, self._last_wanted
        if asked is not request.adapters:  # of one update it is asked more than once
            found = {}
            for name, spec in request.adapters.items():
                found |= by_name(adapter_tensors(name, spec, models))
            self._last_wanted = request.adapters, found
        return replace(models, tensors={**models.tensors, **found}) if found else models

    @property
    def receipts(self) -> tuple[UpdateReceipt, ...]:
        """Receipts of the last commits, oldest first."""
        return tuple(self._receipts)

    def digests(self, timeout: float) -> dict[str, int]:
        """Digest per tensor of the live weights, read on every rank beside generation.

        All of one version: a reading during which something was committed is repeated.
        """
        deadline = time.monotonic() + timeout
        while True:
            asked = gather_replies(self.engine.call("stage_digests", {}), "digest", timeout)
            replies = [reply for reply, _ in asked]
            if len({version for reply in replies for version in reply["versions"]}) == 1:
                return combine([reply["digests"] for reply in replies])
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"commits came faster than the weights could be read, for {timeout:g} s"
                )

    def committed_at(self, version: int) -> float | None:
        """When a recent version went live, by ``time.monotonic()``."""
        return self._committed.get(version)

    def relabel(self, label: str) -> None:
        """Set the label of the live version, and of its receipt."""
        check_label(label)
        self._label = label
        if self._receipts and self._receipts[-1].version == self.engine.version:
            self._receipts[-1] = replace(self._receipts[-1], label=label)

    def decide(self, decision: Decision) -> UpdateReceipt | None:
        """Commit or abort the prepared update; returns the receipt of a commit.

        A repeated decision gets the first answer again. ``VersionConflict`` if its fencing epoch is
        below one seen here, or the update is not prepared or has ended the other way. With an
        operator's abort at an engine in no fleet goes the fence of the update's seal.
        """
        with self._decision_lock:
            if decision.fence is not None:
                self._check_fence(decision.fence)
            if (known := self.ended.known(decision.update_id)) is not None:
                return known.answer(decision)
            prepared = self.turn.prepared
            if prepared is None or prepared.update_id != decision.update_id:
                now = self.turn.state if prepared is None else f"{prepared.update_id} is"
                raise VersionConflict(f"update {decision.update_id} is not prepared here: {now}")
            if decision.fence is not None:
                self.fence = max(self.fence, decision.fence)
            elif self._fence_before is not None and self.engine.serving.left is None:
                # In no fleet: its first front counts from 1, whatever somebody has sealed with.
                self.fence = self._fence_before
            return prepared.decided(decision)

    def see_fence(self, fence: int, fleet: int = 0, *, asks: bool = False) -> None:
        """Note the epoch of a coordinator, and of which fleet it is; ``VersionConflict`` if a later
        one of that fleet was seen. Of another fleet's that only ``asks`` nothing is noted.
        """
        with self._decision_lock:
            if not (fleet and self._fleet and fleet != self._fleet):  # each fleet counts its own
                self._check_fence(fence)
            elif asks:
                return
            self.fence, self._fleet = fence, fleet or self._fleet
            self._fence_before = None

    def _check_fence(self, fence: int) -> None:
        if fence < self.fence:
            raise VersionConflict(
                f"fencing epoch {fence} is stale: this engine has seen {self.fence}"
            )

    # ---- what a lease uses ----

    def prepare(self, prepared: Prepared, fence: int) -> None:
        """The ranks have voted yes: the update now waits for ``decide``, and needs no stream.

        ``VersionConflict`` if ``fence`` is below one that was seen.
        """
        with self._decision_lock:
            self._check_fence(fence)
            self.turn.prepare(prepared)
            self._fence_before, self.fence = self.fence, fence

    def wait_for_pins(self, until: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait until no request is pinned to the version before the live one.

        At ``until`` (monotonic time) those that still are take their fallback. ``check`` raises
        once nobody waits for the update any more.
        """
        pins = self.engine.pins
        while not pins.wait(min(_LOOK, until - time.monotonic())):
            check()
            if time.monotonic() >= until:
                self.engine.end_pins("before the next update", _END_OF_PINS)

    def pins_before(self) -> dict[str, str]:
        """For a receipt: what became of the requests that the models' last commit pinned."""
        pins = self.engine.pins
        return {"pins": pins.told} if pins.since >= 0 else {}

    def staged_in(self, request: UpdateRequest) -> UpdateRequest:
        """``request`` with staging "auto" resolved, if this engine keeps no memory for a shadow.

        Such an engine loads updates straight into the live weights. A delta needs a shadow:
        ``VersionConflict``, upon which its sender sends everything.
        """
        if not request.models:
            return replace(request, staging="device")  # their slots are beside what is live
        if request.in_flight == "pin":
            self._check_pin(request)
        if request.staging != "auto" or self.served.staging != "none":
            return request
        if request.encoding != "full":
            raise VersionConflict("the engine was started with staging='none': send a full update")
        return replace(request, staging="none")

    def foresee(self, request: UpdateRequest) -> Foreseen | None:
        """What an update with limits would take; ``LimitExceeded`` if it would exceed one.

        None without limits. Called by the holder of the lease, before anything is staged.
        """
        if request.max_stall is None and request.max_extra_memory is None:
            return None
        if not request.models:
            return None  # adapters go where their memory is, and a commit of them moves nothing
        asked = self.engine.call("stage_foresee", {})
        plans = [reply for reply, _ in gather_replies(asked, "foresee", request.timeout)]
        sent = self.served.wanted.tensors.values() if request.metadata is None else request.metadata
        num_bytes = sum(meta.nbytes for meta in sent)
        return self.limits.check(request, plans, self._receipts, num_bytes)

    def pin_terms(self, request: UpdateRequest) -> PinTerms | None:
        """Of requests that it pins; None if two versions cannot run at a time."""
        staging = self._staging(request)
        if staging == "none" or (staging == "host" and self.served.device != "cpu"):
            return None
        seconds = request.pin_timeout or request.timeout
        return PinTerms(timeout=seconds, fallback=request.pin_fallback)

    def _check_pin(self, request: UpdateRequest) -> None:
        """Raise ``ConfigError`` if two versions cannot run at a time."""
        if self.pin_terms(request) is None:
            raise ConfigError(
                'in_flight="pin" runs two versions at a time, and '
                f"staging={self._staging(request)!r} leaves no "
                'second instance on the device: use staging="device" (memory for it is set aside '
                'when the engine starts with it), or in_flight="keep", "recompute" or "wait"'
            )

    def _staging(self, request: UpdateRequest) -> str:
        return self.served.staging if request.staging == "auto" else request.staging

    def staging_begins(self, request: UpdateRequest) -> None:
        """Ranks are about to overwrite their shadow, or (staging "none") what is live."""
        overwrites = self.served.undo == "shadow" or request.staging == "none"
        if overwrites and request.models and self.models_changed:
            self.can_roll_back = False

    def restore(self, timeout: float) -> str | None:
        """After an unstaged update failed: bring all ranks back to the weights before it.

        Returns None, or why that failed. Needs an ``undo`` that kept what was live.
        """
        try:
            gather_replies(self.engine.call("stage_restore", {}), "restore", timeout)
            if self.switch.held is not None and self.digests(timeout) != self.switch.held:
                return "what was kept of them is damaged"
        except Exception as error:  # noqa: BLE001 - whatever a device raises: nobody may generate
            return str(error)
        return None

    def check_fields(self, request: UpdateRequest, transports: tuple[str, ...]) -> Accepted:
        """Raise what is wrong with the request itself, regardless of what is live."""
        check_room(request.adapters, self.served.max_adapters, self.served.max_lora_rank)
        wanted = self.wanted(request)
        for spec in request.adapters.values():
            spec.check_modules(self.served.adaptable)
        return check_request(
            request,
            transports=transports,
            num_ranks=self.served.num_ranks,
            device=self.served.device,
            wanted=wanted,
        )

    def check(self, request: UpdateRequest) -> int:
        """The version that the update will make; called by the holder of the lease."""
        live = (self.engine.epoch, self.engine.version)
        if request.models and self.engine.control.parked:
            raise EngineClosed(PARKED)
        if self.engine.leaving and self.engine.serving.left is None:  # a member's fleet knows
            raise EngineClosed(LEAVING)
        if request.base is not None and tuple(request.base) != live:
            raise VersionConflict(
                f"built on (epoch, version) {tuple(request.base)}, but {live} is live"
            )
        version = next_version(request.version, live[1])
        self.adapters.check(request)
        check_merged(
            self.merged_after(request), self.adapters.after(request), sent=bool(request.merged)
        )
        others = set(self.served.wanted.components) - set(request.components)
        if self.engine.broken is not None and (
            request.partial or request.encoding == "delta" or others
        ):
            every = f" of {' and '.join(self.served.wanted.components)}" if others else ""
            raise EngineBroken(
                f"only a full update{every} is taken until one commits: {self.engine.broken}"
            )
        return version

    def merged_after(self, request: UpdateRequest) -> tuple[str, ...]:
        """``merged`` once this update is live: what a partial one leaves may hold more."""
        if POLICY not in request.components:
            return self.merged
        return tuple(dict.fromkeys([*(self.merged if request.partial else ()), *request.merged]))

    def record(
        self,
        receipt: UpdateReceipt,
        label: str | None,
        held: dict[str, int],
        reversible: bool = False,
        models: bool = True,
        merged: tuple[str, ...] = (),
    ) -> None:
        """Remember a commit; ``held``: digest per tensor of the models that are live now.

        ``models``: whether it changed any of them; ``merged``: see ``WeightInfo``.
        """
        log.info(
            "version %d is live: %s, %d tensors by %s, stalled %.4f s",
            *(receipt.version, receipt.update_id or "rolled back", receipt.num_tensors),
            *(receipt.transport, receipt.timings.get("stall", 0.0)),
        )
        self._committed[receipt.version] = time.monotonic()
        if len(self._committed) > KEPT_RECEIPTS:
            del self._committed[next(iter(self._committed))]
        self._receipts.append(receipt)
        if models:
            self.held_before, self.switch.held = self.switch.held, held
            self.merged_before, self.merged = self.merged, merged
        if self._note_version is not None and (held or not models):
            self._note_version(receipt.version, held, self.adapters.known)
        self.label_before, self._label = self._label, label
        self.can_roll_back, self.models_changed = reversible, models
        self.adapters.prune()
        self.engine.counters.record_update(receipt.timings.get("stall", 0.0))
