"""The two instances of the model on one rank: the live one, and its shadow.

    live ---- generation runs it          shadow ---- the next update fills it
      ^----------------- swap ----------------^       (swapping again goes back)

They share no parameter. The shadow is built by the first staged update. After a level 2 sleep
there is no live instance until a full update has been committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rollout.errors import EngineBroken, EngineClosed, VersionConflict
from rollout.models.causal_lm import CausalLM
from rollout.models.weight_load import WeightLoad
from rollout.weights import WeightSlot

COPY_CHUNK = 4 << 20  # elements copied at once: a step waits for at most one such piece


class ModelInstances:
    """Holds live and shadow; implements ``rollout.weight_sync.receiver.UpdateHost``.

    ``swap`` is for the main thread, all else for the staging thread; the order of calls (a vote
    before its commit, a commit before the next begin) keeps them apart. Where ``shadow_device`` is
    another device than the live one's, contents are exchanged instead of the instances.
    """

    def __init__(
        self, live: CausalLM, build: Callable[[torch.device], CausalLM], shadow_device: torch.device
    ) -> None:
        self._live: CausalLM | None = live
        self._shadow: CausalLM | None = None
        self._build, self._shadow_device = build, shadow_device
        self._device = live.build.device
        self._in_place = False  # the sealed update was loaded straight into the live instance
        self._parked: dict[str, Tensor] = {}  # weights in host memory while the device is lent out

    @property
    def live(self) -> CausalLM:
        if self._live is None:
            raise EngineBroken(
                "the weights were dropped by sleep(level=2); wake up and send a full update"
            )
        if self._parked:
            raise EngineClosed("the weights are in host memory; wake_up(tags=['weights']) first")
        return self._live

    @property
    def has_shadow(self) -> bool:
        return self._shadow is not None

    # ---- UpdateHost ----

    def open_shadow(self, partial: bool) -> WeightLoad:
        """A load into the shadow; ``partial`` copies the live weights there first."""
        self._in_place = False
        live = self.live if partial else None
        if self._shadow is None:
            self._shadow = self._make_shadow()
        if live is not None:
            _copy(live, self._shadow)
        return self._shadow.begin_load()

    def open_live(self) -> WeightLoad:
        """A load straight into the live instance; nothing may run until it is committed.

        There is no way back from it: the version that a shadow held is given up.
        """
        self._shadow = None
        if self._live is None:
            self._live = self._build(self._device)
        self._in_place = True
        return self._live.begin_load()

    def finish_load(self, live: bool) -> None:
        """Nothing is left to derive: ``WeightLoad.finish`` ran ``after_load``."""
        self._in_place = live

    def slots(self) -> Iterator[WeightSlot]:
        """Every slot of this rank; both instances have the same."""
        model = self.live if self._shadow is None else self._shadow
        for slots in model.table.slots.values():
            yield from slots

    def read_slots(self, live: bool) -> Iterator[tuple[WeightSlot, Tensor]]:
        """Every slot of this rank with its values, read through the layouts."""
        model = self.live if live else self._shadow
        if model is None:
            raise VersionConflict("the staged version is gone: the engine fell asleep meanwhile")
        for slots in model.table.slots.values():
            for slot in slots:
                yield slot, model.read_slot(slot)

    # ---- the main thread's side ----

    def commit(self) -> None:
        """Make what was loaded live; what was live stays in the shadow until the next load."""
        if self._in_place:
            self._in_place = False
            return
        self.swap()

    def swap(self) -> None:
        """Exchange live and shadow; ``VersionConflict`` where there is no shadow."""
        if self._shadow is None:
            raise VersionConflict("this rank holds no other version to switch to")
        if self._live is not None and self._shadow_device != self._device:
            _exchange(self._live, self._shadow)
            return
        self._live, self._shadow = self._shadow, self._live

    def drop_shadow(self) -> None:
        self._shadow = None

    def drop_weights(self) -> None:
        """Let go of both instances; only a full update brings weights back."""
        self._live = self._shadow = None
        self._parked = {}

    def park(self) -> None:
        """Move the live weights to host memory; on a CPU they stay where they are."""
        if self._device.type == "cpu" or self._live is None or self._parked:
            return
        for name, parameter in self._live.named_parameters():
            self._parked[name] = parameter.data.cpu()
            parameter.data = parameter.data.new_empty(0)

    def unpark(self) -> None:
        """Bring parked weights back to the device."""
        parked, self._parked = self._parked, {}
        if self._live is not None:
            for name, parameter in self._live.named_parameters():
                if name in parked:
                    parameter.data = parked.pop(name).to(self._device)

    def _make_shadow(self) -> CausalLM:
        if self._live is not None and self._shadow_device == self._device:
            return self._live.empty_like()
        # With nothing live, the shadow becomes the live instance as it is.
        return self._build(self._device if self._live is None else self._shadow_device)


def _pairs(a: CausalLM, b: CausalLM) -> Iterator[tuple[Tensor, Tensor]]:
    """Matching pieces of the two instances' parameters, as flat views of bounded size."""
    others = dict(b.named_parameters())
    for name, parameter in a.named_parameters():
        x, y = parameter.data.view(-1), others[name].data.view(-1)
        yield from zip(torch.split(x, COPY_CHUNK), torch.split(y, COPY_CHUNK), strict=True)


def _copy(source: CausalLM, target: CausalLM) -> None:
    for x, y in _pairs(source, target):
        y.copy_(x)


def _exchange(a: CausalLM, b: CausalLM) -> None:
    for x, y in _pairs(a, b):
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)
    a.after_load()
    b.after_load()
