"""What a rank's instances hold, read beside the steps: digests, and copies of values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from torch import Tensor

from rollout.models.model import Model
from rollout.weights import WeightSlot

_AT_ONCE = 1 << 31  # elements digested in one go on a device: a sleep waits for at most these


class WeightReader:
    """``instance(live)``: the live one or its shadow; raises where it is gone.

    Whoever parks or drops weights holds ``lock``, which every reading takes for some slots at a
    time.
    """

    def __init__(self, instance: Callable[[bool], Model]) -> None:
        self._instance, self.lock = instance, threading.Lock()

    def digest_slots(
        self,
        live: bool,
        names: frozenset[str] | None = None,
        nonfinite: list[tuple[WeightSlot, int]] | None = None,
    ) -> Iterator[tuple[WeightSlot, int]]:
        """Every slot of this rank with the digest of its values; ``names`` are sources.

        Reads beside the main thread: some slots at a time, between which the weights may be
        parked or dropped; then it raises. ``nonfinite``: where given, it is filled with the slots
        that hold NaN or infinity, and how many.
        """
        model = self._instance(live)
        every, alone = model.table.slots, _alone(model)
        wanted = [
            slot for source in every if names is None or source in names for slot in every[source]
        ]
        for slots in _parts(wanted, 1 if alone else _AT_ONCE):
            with self.lock:
                found = self._read(self._instance(live), slots, nonfinite is not None)
            sent = map(model.as_sent, slots) if model.table.quantized else slots
            for slot, (value, bad) in zip(sent, found, strict=True):
                if nonfinite is not None and bad:
                    nonfinite.append((slot, bad))
                yield slot, value

    def live_digests(self, live: bool) -> list[tuple[WeightSlot, int]]:
        """Every quantised slot with the digest that its codes and scales had when written;
        ``digest_slots`` says whether they still have it.
        """
        with self.lock:
            return self._instance(live).written_digests()

    @staticmethod
    def _read(model: Model, slots: list[WeightSlot], finite: bool) -> list[tuple[int, int]]:
        if not _alone(model):
            return model.digest_slots(slots)
        found = []
        for slot in slots:
            bad = [0] if finite else None
            found.append((model.digest_slot(slot, bad), bad[0] if bad else 0))
        return found

    def read_slots(self, names: frozenset[str]) -> Iterator[tuple[WeightSlot, Tensor]]:
        """Every slot of the live weights whose source is in ``names``, and a copy of its values."""
        for source, slots in self._instance(True).table.slots.items():
            for slot in slots if source in names else ():
                with self.lock:
                    values = self._instance(True).read_slot(slot).contiguous().cpu().clone()
                yield slot, values

    def nonfinite(self) -> tuple[str, ...]:
        """The sources of the live weights that hold NaN or infinity; takes as long as digests."""
        bad: list[tuple[WeightSlot, int]] = []
        for _ in self.digest_slots(live=True, nonfinite=bad):
            pass
        return tuple(dict.fromkeys(slot.source for slot, _ in bad))


def _parts(slots: list[WeightSlot], numel: int) -> Iterator[list[WeightSlot]]:
    """Some slots at a time, of at least ``numel`` elements but for the last ones."""
    part: list[WeightSlot] = []
    size = 0
    for slot in slots:
        part.append(slot)
        size += slot.take.numel
        if size >= numel:
            yield part
            part, size = [], 0
    if part:
        yield part


def _alone(model: Model) -> bool:
    """Whether slots are digested one by one."""
    return model.build.device.type == "cpu" or bool(model.table.quantized)
