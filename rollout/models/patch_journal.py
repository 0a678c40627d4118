"""What a load has overwritten, so that another instance can be brought up to it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

SHARE = 64  # a parameter of which more than a 1 / 64 was overwritten is copied whole


class PatchJournal:
    """The elements of each parameter that a load has written: few of them, or all.

    Takes 8 bytes for each of those few, at most a 1 / 64 of the elements.
    """

    def __init__(self) -> None:
        self._places: dict[str, list[Tensor]] = {}
        self._counts: dict[str, int] = {}
        self._whole: set[str] = set()
        self._everything = False

    def note(self, param: str, places: Tensor, numel: int) -> None:
        """``places`` of the parameter's flattened storage of ``numel`` elements were written."""
        count = self._counts[param] = self._counts.get(param, 0) + len(places)
        if param in self._whole or count > numel // SHARE:
            self.note_whole(param)
        else:
            self._places.setdefault(param, []).append(places)

    def note_whole(self, param: str) -> None:
        self._whole.add(param)
        self._places.pop(param, None)

    def note_everything(self) -> None:
        """More may have been written than anybody can tell."""
        self._everything = True
        self._places.clear()

    def copy(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        """What was written, from one instance's storages to another's."""
        for name in source if self._everything else self._whole:
            target[name].copy_(source[name])
        for name, parts in self._places.items():
            values, into = source[name].view(-1), target[name].view(-1)
            for places in parts:
                into.index_copy_(0, places, values.index_select(0, places))
