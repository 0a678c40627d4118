"""What a load has overwritten, so that another instance can be brought up to it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollout.kernels import nontemporal_copy

SHARE = 64  # a parameter of which more than a 1 / 64 was overwritten is copied whole
CHUNK = 4 << 20  # elements copied at once: a step waits for at most one such piece


class PatchJournal:
    """The elements of each parameter that a load has written: few of them, or all.

    Takes 4 bytes (8 in parameters of 2^31 elements) for each of those few, at most a 1 / 64 of all.
    ``everything``: of a load that nobody has watched.
    """

    def __init__(self, *, everything: bool = False) -> None:
        self._places: dict[str, list[Tensor]] = {}
        self._counts: dict[str, int] = {}
        self._whole: set[str] = set()
        self._everything = everything

    def note(self, param: str, places: Tensor, numel: int) -> None:
        """``places`` of the parameter's flattened storage of ``numel`` elements were written."""
        if self._everything or param in self._whole:
            return
        count = self._counts[param] = self._counts.get(param, 0) + len(places)
        if count > numel // SHARE:
            self.note_whole(param)
            return
        # A copy, which holds no longer buffer alive.
        kind = torch.int32 if numel < 1 << 31 else torch.int64
        self._places.setdefault(param, []).append(places.to(kind, copy=True))

    def note_whole(self, param: str) -> None:
        self._whole.add(param)
        self._places.pop(param, None)

    def note_everything(self) -> None:
        """More may have been written than anybody can tell."""
        self._everything = True
        self._places.clear()

    def copy(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        """What was written, from one instance's storages to another's, on any devices.

        Of parameters that ``source`` leaves out, nothing.
        """
        for name in source if self._everything else self._whole & source.keys():
            pairs = zip(
                *(torch.split(x[name].view(-1), CHUNK) for x in (target, source)), strict=True
            )
            for into, values in pairs:
                nontemporal_copy(into, values)
        for name, parts in self._places.items():
            if name not in source:
                continue
            values, into = source[name].view(-1), target[name].view(-1)
            for places in parts:
                taken = values.index_select(0, places.to(values.device)).to(into.device)
                into.index_copy_(0, places.to(into.device, torch.int64), taken)
