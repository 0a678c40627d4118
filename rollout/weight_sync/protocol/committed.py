"""What a sender keeps of the version that an engine holds, for the next delta."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout.kernels import nontemporal_copy
from rollout.weight_sync.protocol.cells import EncodedCells, encode_cells
from rollout.weight_sync.protocol.delta import EncodedDelta, encode
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weights import Box


@dataclass(slots=True)
class Committed:
    """What one rank sent of the version that an engine holds, as it was sent, by (tensor, box).

    ``cut``: how the ranks' shards were cut, "" for whole tensors that one rank sent alone.
    """

    epoch: int = 0
    version: int = -1
    cut: str = ""
    since_full: int = 0  # commits since the last full one
    values: dict[tuple[str, Box], Tensor] = field(default_factory=dict)

    def is_live(self, epoch: int, version: int, cut: str = "") -> bool:
        """Whether anything was kept, and of this version."""
        kept = (self.epoch, self.version, self.cut)
        return bool(self.values) and kept == (epoch, version, cut)

    def change(self, name: str, box: Box, values: Tensor, max_bytes: int) -> EncodedDelta | None:
        """The change of a box against its copy, which becomes ``values``; None: send it whole.

        An update that then fails must drop this object.
        """
        held = self.values.get((name, box))
        if held is None or held.dtype != values.dtype:
            self.keep(name, box, values)
            return None
        return encode(held, values.contiguous(), max_bytes)

    def changed_cells(
        self, name: str, values: Tensor, cell: tuple[int, int], max_bytes: int
    ) -> EncodedCells | None:
        """As ``change``, of a whole matrix and in whole cells."""
        box = Box.full(tuple(values.shape))
        held = self.values.get((name, box))
        if held is None or held.dtype != values.dtype:
            self.keep(name, box, values)
            return None
        return encode_cells(held, values.contiguous(), cell, max_bytes)

    def keep(self, name: str, box: Box, values: Tensor, into: Tensor | None = None) -> None:
        """Copy a box, ``into`` memory that is no longer needed where that is like it."""
        if into is None or into.dtype != values.dtype:
            into = torch.empty(box.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self.values[name, box] = nontemporal_copy(into, values)


class DeltaBase:
    """The last committed version of one engine, as this rank knows it: one copy in host memory.

    Belongs to whoever talks to the engine (``WeightVerbs``) and lives between updates. An update
    takes the copy out and puts it back when it has committed; one that fails leaves none, and the
    next is full. ``rest`` counts the updates for which "auto" will not try again, after it
    found that most elements change.
    """

    def __init__(self) -> None:
        self._committed: Committed | None = None
        self._lock = threading.Lock()
        self.rest = 0

    def take(self) -> Committed:
        with self._lock:
            taken, self._committed = self._committed, None
        return taken if taken is not None else Committed()

    def put(self, committed: Committed) -> None:
        with self._lock:
            self._committed = committed

    def stays(self, before: WeightInfo, receipt: UpdateReceipt) -> None:
        """A commit changed no model's weights: copies of what was live are of what is live.

        They are dropped where its version does not follow on ``before``: what other senders
        committed in between may have changed them.
        """
        with self._lock:
            copies = self._committed
            if copies is None or not copies.is_live(before.epoch, before.version, copies.cut):
                return
            if (receipt.epoch, receipt.version) != (before.epoch, before.version + 1):
                self._committed = None
            else:
                copies.version = receipt.version

    @property
    def nbytes(self) -> int:
        """Host memory held now."""
        with self._lock:
            held = self._committed.values.values() if self._committed is not None else ()
            return sum(tensor.nbytes for tensor in held)
