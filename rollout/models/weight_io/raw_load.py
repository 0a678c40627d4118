"""One rank's parameters as bytes: what an equal rank of another engine takes as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rollout.errors import WeightMismatch, some
from rollout.models.weight_io.load import LoadReport
from rollout.weights import Box, CellPatch, TensorPiece, WeightValue

_MARK = "raw"


def raw_name(rank: int, param: str) -> str:
    """What the memory of a rank's parameter is called in an update, uint8 [its bytes]."""
    return f"{_MARK}/{rank}/{param}"


def raw_bytes(storage: Tensor) -> Tensor:
    """The memory of a parameter itself, uint8 [its bytes]."""
    return storage.detach().view(-1).view(torch.uint8)


class RawLoad:
    """As ``WeightLoad``, of the memory of an equal rank: codes and scales come as they are there.

    Names are ``raw_name``s; other ranks' are passed over. Where a layout differs the bytes mean
    other values, as the digests of the slots then tell.
    """

    def __init__(
        self, storages: Mapping[str, Tensor], rank: int, after_load: Callable[[], None]
    ) -> None:
        self._rank, self._after_load = rank, after_load
        self._storages = {
            raw_name(rank, param): raw_bytes(storage) for param, storage in storages.items()
        }
        self._left = {name: storage.numel() for name, storage in self._storages.items()}
        self._nbytes = 0

    def feed(
        self, items: Iterable[tuple[str, WeightValue | CellPatch]], *, together: bool = False
    ) -> None:
        """Write each item; ``WeightMismatch`` for one that this rank has not, or not so large."""
        for name, value in items:
            if name.startswith(f"{_MARK}/") and name.split("/")[1] != str(self._rank):
                continue
            storage = self._storages.get(name)
            if storage is None or tuple(value.shape) != storage.shape or value.dtype != torch.uint8:
                held = "none" if storage is None else f"uint8 {list(storage.shape)}"
                raise WeightMismatch(
                    f"{name}: {value.dtype} {list(value.shape)} came, and this rank has {held}: "
                    "engines that are not equal give each other no memory"
                )
            self._write(name, storage, value)

    def finish(
        self, *, partial: bool = False, components: Sequence[str] | None = None
    ) -> LoadReport:
        """``WeightMismatch`` where not every byte has come once."""
        wrong = sorted(name for name, left in self._left.items() if left)
        if wrong:
            raise WeightMismatch(f"not every byte came once of {some(wrong)}")
        self._after_load()
        return LoadReport(frozenset(self._storages), frozenset(), self._nbytes)

    def _write(self, name: str, storage: Tensor, value: WeightValue | CellPatch) -> None:
        if isinstance(value, TensorPiece):
            box, values = value.box, value.values
        else:
            assert isinstance(value, Tensor)
            box, values = Box.full(storage.shape), value
        storage[box.slices].copy_(values)
        self._left[name] -= box.numel
        self._nbytes += box.numel
