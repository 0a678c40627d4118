"""Where the inputs of captured steps lie: at fixed addresses of the device, and in the host."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_cuda: Any = torch.cuda  # parts of it have no types
_WORD = 8  # bytes, of which each array takes whole ones
Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shapes and dtypes, by name


class InputMemory:
    """Arrays and block tables on the device, and a copy of both in pinned host memory.

    One transfer moves what is short, a second the rows of the block tables in use, of each of
    several ``groups`` of layers. ``host`` and ``device``: each of ``fields``, in whose order they
    lie, zeros at first; ``input_ids`` is among them. ``device`` has those of ``there``, too, which
    nothing moves. ``tables``, and ``block_rows`` in the host:
    int32 [sequences, max_blocks], of several groups with one more dimension in front.
    """

    def __init__(
        self,
        fields: Fields,
        sequences: int,
        max_blocks: int,
        device: torch.device,
        groups: int,
        there: Fields,
    ) -> None:
        on_card = device.type == "cuda"
        self._ends: dict[str, int] = {}  # in words
        end = 0
        for name, (shape, dtype) in fields.items():
            end += -(-prod(shape) * dtype.itemsize // _WORD)
            self._ends[name] = end
        self._host = torch.zeros(end, dtype=torch.int64, pin_memory=on_card)
        self._device = torch.zeros(end, dtype=torch.int64, device=device)
        views = self._views(fields, self._host)
        self.host: dict[str, NDArray[Any]] = {name: each.numpy() for name, each in views.items()}
        self.device = self._views(fields, self._device)
        for name, (size, dtype) in there.items():
            self.device[name] = torch.zeros(size, dtype=dtype, device=device)
        shape = (groups, sequences, max_blocks)
        rows = torch.zeros(shape, dtype=torch.int32, pin_memory=on_card)
        tables = torch.zeros(shape, dtype=torch.int32, device=device)
        # A copy for each group: the rows of all do not lie behind one another.
        self._of_groups = [*zip(tables, rows, strict=True)]
        self.tables = tables if groups > 1 else tables[0]
        self.block_rows: NDArray[np.int32] = (rows if groups > 1 else rows[0]).numpy()
        self._moved: Any = _cuda.Event() if on_card else None

    def await_move(self) -> None:
        """Until the host's copy may be written: the transfer of the step before reads it."""
        if self._moved is not None:
            self._moved.synchronize()

    def move(
        self, sequences: int = 0, input_ids: Tensor | None = None, last: str | None = None
    ) -> None:
        """Begin to move the fields up to ``last`` (None: all), and so many rows of block tables.

        ``input_ids``: the step's, which may be on the device already, as the step before has drawn
        them.
        """
        words = len(self._host) if last is None else self._ends[last]
        self._device[:words].copy_(self._host[:words], non_blocking=True)
        if input_ids is not None and input_ids.device.type != "cpu":
            self.device["input_ids"][: len(input_ids)] = input_ids
        for there, here in self._of_groups:
            there[:sequences].copy_(here[:sequences], non_blocking=True)
        if self._moved is not None:
            self._moved.record(_cuda.current_stream(self._device.device))

    def _views(self, fields: Fields, words: Tensor) -> dict[str, Tensor]:
        found, start = {}, 0
        for name, (shape, dtype) in fields.items():
            elements = words[start : self._ends[name]].view(dtype)
            found[name], start = elements[: prod(shape)].view(shape), self._ends[name]
        return found
