"""The two instances of the model on one rank: the live one, and its shadow.

    live ---- generation runs it          shadow ---- the next update fills it
      ^----------------- swap ----------------^       (swapping again goes back)

They share no parameters. The shadow is built by the first staged update. After a level 2 sleep
there is no live instance until a full update has been committed. For a rollback that outlives the
shadow, ``undo`` says what is kept beside the two; see ``rollback.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from rollout.engine.worker.rollback import KeptVersion, RollbackSnapshot, exchange
from rollout.engine.worker.weight_reader import WeightReader
from rollout.errors import EngineBroken, EngineClosed, VersionConflict
from rollout.kernels.warm_up import warm_up_updates
from rollout.models.model import Model
from rollout.models.weight_io.load import WeightLoad
from rollout.models.weight_io.patch_journal import PatchJournal
from rollout.models.weight_io.raw_load import RawLoad, raw_bytes
from rollout.weights import WeightSlot
from rollout.weights.components import component_of

PARKED = "the weights are in host memory; wake_up(tags=['weights']) first"


class ModelInstances:
    """Holds live and shadow.

    A commit swaps the two and moves no bytes. Their contents are exchanged instead if the shadow is
    on another device, or if captured graphs hold addresses of the live instance (``pinned``) and
    none were captured over the shadow (``may_flip``). ``forget`` is called with a shadow that is
    dropped.

    ``commit``, ``go_back`` and ``revert`` are called from the main thread, everything else from the
    staging thread; the order of calls (a vote before its commit, a commit before the next begin)
    keeps them apart.

    ``undo``: "shadow" keeps nothing beside the two. "host" keeps a copy, "sparse" the elements
    that differ, of the version before the live one, once the shadow is overwritten or where there
    is none; and of the live version while an update goes straight into its instance.
    """

    def __init__(
        self,
        live: Model,
        build: Callable[[torch.device], Model],
        shadow_device: torch.device,
        undo: str = "shadow",
        *,
        pinned: bool = False,
        may_flip: Callable[[Model], bool] = lambda shadow: False,
        forget: Callable[[Model], None] = lambda shadow: None,
    ) -> None:
        self._live: Model | None = live
        self._shadow: Model | None = None
        self._build, self._shadow_device, self._undo = build, shadow_device, undo
        self._table, self._nbytes = live.table, _bytes_of(live)
        self._device, self._pinned = live.build.device, pinned
        self._may_flip, self._on_forget = may_flip, forget
        self._shadow_lock = threading.Lock()
        self._flipped: Any = None  # an event: what was live before runs no step after it
        self._in_place = False  # the live instance is being loaded, or has been but for the commit
        self._parked: dict[str, Tensor] = {}  # weights in host memory while the device is lent out
        # Contents have names: whatever is loaded gets a new one, None is no version.
        self._names = count()
        self._live_is: int | None = next(self._names)
        self._shadow_is: int | None = None
        self._past: list[int | None] = []  # what was live before, newest last
        self._kept: KeptVersion | None = None
        self._revert: Callable[[], object] | None = None  # undoes the last commit
        self.reader = WeightReader(self.instance)
        # What was written to the shadow since it was brought up to live; once that is committed,
        # the two contents named in ``_diff`` differ in nothing else.
        self._written: PatchJournal | None = None
        self._diff: tuple[frozenset[int | None], PatchJournal] | None = None

    @property
    def live(self) -> Model:
        if self._live is None:
            raise EngineBroken(
                "the weights were dropped by sleep(level=2); wake up and send a full update"
            )
        self._check_awake()
        return self._live

    @property
    def is_parked(self) -> bool:
        """Whether the live weights lie in host memory, until ``unpark``."""
        return bool(self._parked)

    def _check_awake(self) -> None:
        if self._parked:
            raise EngineClosed(PARKED)

    @property
    def previous(self) -> Model:
        """What was live before the last commit, for steps by it; ``VersionConflict`` where it is
        not there, or where no step can run it.
        """
        shadow, past = self._shadow, self._past[-1] if self._past else None
        if shadow is None or past is None or self._shadow_is != past:
            raise VersionConflict("this rank does not hold the version before the live one")
        if shadow.build.device != self._device:
            raise VersionConflict("the version before the live one lies in host memory")
        return shadow

    def shadow_is_read(self) -> None:
        """By what was enqueued on the device, a step or a capture's: the next load waits for it."""
        if self._device.type == "cuda":
            self._note_steps(moved=False)

    @property
    def has_shadow(self) -> bool:
        return self._shadow is not None

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for a rollback, beside the shadow."""
        return 0 if self._kept is None else self._kept.snapshot.nbytes

    @property
    def device_bytes(self) -> int:
        """Bytes of both instances on the device; on a CPU also what is kept for a rollback."""
        held = [one for one in (self._live, self._shadow) if one is not None]
        on_device = sum(_bytes_of(one) for one in held if one.build.device == self._device)
        return on_device + (self.kept_bytes if self._device.type == "cpu" else 0)

    # ---- the staging thread's side ----

    def foresee(self) -> dict[str, dict[str, int]]:
        """What an update would take here, by staging: at most ``extra`` bytes beyond
        ``device_bytes``, and the bytes ``moved`` by its commit.
        """
        return {name: self._foreseen(name) for name in ("auto", "device", "host", "none")}

    def _foreseen(self, staging: str) -> dict[str, int]:
        size, shadow, gone = self._nbytes, self._shadow, self._live is None
        keeps = self._undo != "shadow" and self._device.type == "cpu" and not gone
        undo = max(0, size - self.kept_bytes) if keeps else 0
        if staging == "none":
            return {"extra": size if gone else undo, "moved": 0}
        device = self._shadow_goes_to(staging)
        there = shadow is not None and shadow.build.device == device
        extra = size if device == self._device and not there else 0
        flips = device == self._device and (
            not self._pinned or (shadow is not None and there and self._may_flip(shadow))
        )
        return {"extra": extra + undo, "moved": 0 if flips or gone else size}

    def _shadow_goes_to(self, staging: str) -> torch.device:
        if self._live is None:
            return self._device  # the shadow becomes the live instance as it is
        chosen = {"host": torch.device("cpu"), "device": self._device}.get(staging)
        return self._shadow_device if chosen is None else chosen

    def open_shadow(
        self, partial: bool, staging: str = "auto", components: Sequence[str] | None = None
    ) -> WeightLoad:
        """A load into the shadow; ``partial`` copies the live weights there first.

        If the last update wrote only a little, only that is copied; for a load that is not partial,
        only the components other than ``components``, which are sent whole.
        ``staging`` "host" or "device" puts the shadow there, "auto" where it was configured.
        ``EngineClosed`` where the live weights are parked: nothing could change places with them.
        """
        self._check_awake()
        builds_on_live = partial or bool(self._beside(components))
        live = self.live if builds_on_live else None
        held = self._shadow_is
        if self._undo != "shadow":
            self._keep_previous()
        self._in_place, self._revert, self._shadow_is = False, None, None
        device = self._shadow_goes_to(staging)
        with self._shadow_lock:  # the main thread may be at it, for the first step after a sleep
            self._wait_for_steps()
            if self._shadow is None or self._shadow.build.device != device:
                self._give_up_shadow()
                held = None
                self._shadow = self._make_shadow(device)
        if live is not None:
            beside = None if partial else self._beside(components)
            self._bring_up(live, self.instance(False), held, beside)
        session = self.instance(False).begin_load()  # a sleep may have dropped it meanwhile
        self._written = session.journal if builds_on_live else None
        return session

    def open_raw(self, staging: str, rank: int) -> RawLoad:
        """As ``open_shadow``, for the memory of an equal rank of another engine."""
        self.open_shadow(False, staging)
        shadow = self.instance(False)
        return RawLoad(shadow.storages(), rank, shadow.after_load)

    def raw_sizes(self) -> list[tuple[str, int]]:
        """The parameters of the live weights, and how many bytes each takes."""
        return [(name, raw_bytes(t).numel()) for name, t in self.live.storages().items()]

    def read_raw(self, param: str, start: int, stop: int) -> Tensor:
        """A copy of bytes of a parameter of the live weights."""
        with self.reader.lock:
            storage = raw_bytes(self.instance(True).storages()[param])
            return storage[start:stop].cpu().clone()

    def open_live(self, components: Sequence[str] | None = None) -> WeightLoad:
        """A load straight into the live instance; nothing may run until it is committed.

        What a shadow held is given up. The live version is kept first, unless ``undo`` is
        "shadow": then there is no way back from it. ``components`` come whole, others stay.
        ``EngineClosed`` as ``open_shadow``.
        """
        self._check_awake()
        if self._beside(components):
            _ = self.live  # EngineBroken where the others are gone
        if self._device.type == "cuda":  # a rank that answers no tokens waits for no step
            torch.cuda.synchronize(self._device)
        self.drop_shadow()
        self._in_place = False
        if self._live is None:
            self._live = self._build(self._device)
        elif self._undo != "shadow" and self._live_is is not None:
            self._kept = KeptVersion(RollbackSnapshot.whole(self._live), self._live_is, None)
        self._in_place, self._live_is = True, None
        return self.live.begin_load()

    def finish_load(self, live: bool) -> None:
        """Everything is loaded and derived: what is kept for a rollback may shrink."""
        if live and self._undo == "sparse" and self._kept is not None and self._live is not None:
            self._kept.snapshot.shrink(self._live)

    def restore_live(self) -> None:
        """After a failed load into the live instance: as it was before; else nothing to do.

        ``VersionConflict`` where nothing was kept.
        """
        if not self._in_place:
            return
        kept = self._kept
        if kept is None or self._live is None:
            raise VersionConflict("this rank kept nothing of the weights that were overwritten")
        kept.exchange(self._live)
        self._contents_moved()
        self._in_place, self._live_is = False, kept.leads_from
        self._kept = None

    def slots(self) -> Iterator[WeightSlot]:
        """Every slot of this rank, with all that it takes; the same for both instances."""
        model = self.live if self._shadow is None else self._shadow
        for slots in model.table.slots.values():
            for slot in slots:
                yield replace(slot, take=model.table.needs(slot))

    @property
    def scheme(self) -> str:
        """Of quantised linears; "" where there are none."""
        scheme = self.instance(self._shadow is None).build.quantization
        return "" if scheme is None else scheme.name

    def instance(self, live: bool) -> Model:
        """The live one or its shadow; raises where it is gone."""
        model = self.live if live else self._shadow
        if model is None:
            raise VersionConflict("the staged version is gone: the engine fell asleep meanwhile")
        return model

    # ---- the main thread's side ----

    def commit(self) -> bool:
        """Make what was loaded live; what was live stays in the shadow until the next load.

        Returns whether bytes were moved: then what was digested is not what is live.
        """
        if not self._in_place:
            before = self._live_is
            moved = self._swap()
            self._live_is = next(self._names)
            self._diff = None
            if self._written is not None:
                self._diff = frozenset((self._live_is, self._shadow_is)), self._written
            self._moved(before, self._swap)
            return moved
        self._in_place, self._live_is = False, next(self._names)
        if self._kept is None:
            self._moved(None, None)
            return False
        self._kept.leads_from = self._live_is
        self._moved(self._kept.leads_to, self._exchange_kept)
        return False

    @property
    def way_back(self) -> Callable[[], bool] | None:
        """What brings back the weights before the last commit; None where they are gone."""
        target, before = self._past[-1] if self._past else None, self._live_is
        if target is not None and before is not None and self._shadow_is == target:
            return self._swap
        if self._kept is not None and self._kept.is_between(before, target):
            return self._exchange_kept
        return None

    def digests_before(self) -> list[tuple[WeightSlot, int]] | None:
        """Of what the way back leads to; None where no instance holds it."""
        swaps = self.way_back == self._swap
        return list(self.reader.digest_slots(live=False)) if swaps else None

    def go_back(self) -> bool:
        """Make what was live before the last commit live again; ``VersionConflict`` if gone.

        Returns whether bytes were moved.
        """
        before, way = self._live_is, self.way_back
        if way is None:
            raise VersionConflict("this rank holds no other version to go back to")
        moved = way()
        self._moved(before, way)
        return moved

    def revert(self) -> None:
        """Undo the last ``commit`` or ``go_back``, once; ``VersionConflict`` where none can be."""
        if self._revert is None:
            raise VersionConflict("this rank has overwritten what it should go back to")
        self._revert()
        self._revert = None
        self._past.pop()

    def drop_shadow(self) -> None:
        """Drop everything that is kept for a rollback."""
        self._give_up_shadow()
        self._shadow_is = self._revert = self._written = self._diff = None
        self._kept = None

    @torch.inference_mode(False)  # a step may ask for it: updates write to it outside of that mode
    def prepare_shadow(self) -> Model | None:
        """The shadow, made with the live weights in it where there is none, so that steps can be
        captured over it; None where it lies elsewhere. It holds no version to go back to. What an
        update runs on the device has run then.
        """
        with self._shadow_lock:
            made = None
            if self._shadow is None and self._shadow_device == self._device:
                made = self._make_shadow(self._device)
                self._bring_up(self.live, made, None, None)
                made.after_load()
                if self._device.type == "cuda":
                    self._note_steps(moved=False)  # a load of the staging thread waits for these
                self._shadow = made
            shadow = self._shadow
        if made is not None:
            warm_up_updates(made.build.dtype, self._device)
            for live in (True, False):
                for _ in self.reader.digest_slots(live):
                    pass
        here = shadow is not None and shadow.build.device == self._device
        return shadow if here else None

    def drop_weights(self) -> None:
        """Drop both instances; only a full update brings weights back."""
        self.drop_shadow()
        self._in_place = False  # what was loaded there goes, too: there is nothing to commit
        with self.reader.lock:
            self._live = self._live_is = None
            self._parked = {}

    def park(self) -> None:
        """Move the live weights to host memory; on a CPU they stay where they are.

        Waits for the slot that another thread reads.
        """
        if self._device.type == "cpu" or self._live is None or self._parked:
            return
        with self.reader.lock:
            self._live.forget_places()
            for name, parameter in self._live.named_parameters():
                self._parked[name] = parameter.data.cpu()
                parameter.data = parameter.data.new_empty(0)

    def unpark(self) -> None:
        """Bring parked weights back to the device."""
        with self.reader.lock:
            parked, self._parked = self._parked, {}
            for name, parameter in self._live.named_parameters() if self._live else ():
                if name in parked:
                    parameter.data = parked.pop(name).to(self._device)

    def derive_adapters(self, live: bool) -> None:
        """Of the instance that is to be live; where its weights are elsewhere, the first step that
        needs it does.
        """
        model = self._live if live else self._shadow
        if model is not None and not self._parked and model.build.device == self._device:
            model.policy.derive_adapters()

    # ---- helpers ----

    def _contents_moved(self) -> None:
        for model in (self._live, self._shadow):
            if model is not None:
                model.policy.contents_moved()

    def _swap(self) -> bool:
        """Exchange the two; returns whether that moved bytes."""
        live, shadow = self._live, self.instance(False)
        elsewhere = shadow.build.device != self._device
        held = self._pinned and not self._may_flip(shadow)
        moves = live is not None and (held or elsewhere)
        if live is not None and moves:
            exchange(live, shadow)
            self._contents_moved()
        else:
            self._live, self._shadow = shadow, live
        if self._device.type == "cuda":
            self._note_steps(moves)
        self._live_is, self._shadow_is = self._shadow_is, self._live_is
        return moves

    def _beside(self, components: Sequence[str] | None) -> frozenset[str]:
        """The parameters of other components than these; none where None."""
        if components is None:
            return frozenset()
        return frozenset(
            param
            for slots in self._table.slots.values()
            for slot in slots
            if component_of(slot.source) not in components
            for param in self._table.params_of(slot)
        )

    def _note_steps(self, moved: bool) -> None:
        """Steps of what was live may still run; the next load begins on another stream, and waits
        for them there. The host waits only where contents were ``moved``.
        """
        if moved:
            torch.cuda.synchronize(self._device)
            self._flipped = None
            return
        cuda: Any = torch.cuda  # parts of it have no types
        self._flipped = cuda.Event()
        self._flipped.record(cuda.current_stream(self._device))

    def _wait_for_steps(self) -> None:
        """On the staging thread's stream: until no step reads what is about to be overwritten."""
        event, self._flipped = self._flipped, None
        if event is not None:
            cuda: Any = torch.cuda
            cuda.current_stream(self._device).wait_event(event)

    def _give_up_shadow(self) -> None:
        shadow, self._shadow = self._shadow, None
        if shadow is not None:
            self._on_forget(shadow)

    def _bring_up(
        self, live: Model, shadow: Model, held: int | None, params: frozenset[str] | None
    ) -> None:
        """Copy the live weights (those of ``params``) to the shadow, whose content is ``held``, or
        unknown where that is None.
        """
        diff, self._diff = self._diff, None  # the shadow's content ends here
        written = PatchJournal(everything=True)
        if diff is not None and held is not None and {held, self._live_is} == diff[0]:
            written = diff[1]
        source = live.storages()
        if params is not None:
            source = {name: source[name] for name in params}
        written.copy(source, shadow.storages())

    def _exchange_kept(self) -> bool:
        assert self._kept is not None
        self._kept.exchange(self.live)
        self._contents_moved()
        self._live_is = self._kept.leads_from
        return True

    def _moved(self, before: int | None, revert: Callable[[], object] | None) -> None:
        self._past = [*self._past[-1:], before]
        self._revert = revert

    def _keep_previous(self) -> None:
        """Before the shadow is overwritten: keep what a rollback needs of it."""
        target = self._past[-1] if self._past else None
        if target is None or self._live_is is None:
            self._kept = None
        elif self._shadow_is == target and self._shadow is not None:
            self._kept = None
            if self._undo == "host":
                snapshot = RollbackSnapshot.whole(self._shadow)
            else:
                snapshot = RollbackSnapshot.difference(self._shadow, self.live)
            self._kept = KeptVersion(snapshot, target, self._live_is)
        elif self._kept is not None and not self._kept.is_between(self._live_is, target):
            self._kept = None

    def _make_shadow(self, device: torch.device) -> Model:
        if self._live is not None and device == self._device:
            return self._live.empty_like()
        return self._build(device)


def _bytes_of(model: Model) -> int:
    return sum(parameter.nbytes for parameter in model.held_parameters().values())
