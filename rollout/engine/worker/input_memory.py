"""Where the inputs of captured steps lie: at fixed addresses of the device, and in the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_cuda: Any = torch.cuda  # parts of it have no types


class InputMemory:
    """Words of 8 bytes and block tables on the device, and a copy of both in pinned host memory.

    One transfer moves what is short, a second the rows of the block tables in use, of each of
    several ``groups`` of layers. ``host`` and ``device``: int64 [words]; ``tables``, and
    ``block_rows`` in the host: int32 [sequences, max_blocks], of several groups with one more
    dimension in front.
    """

    def __init__(
        self, words: int, sequences: int, max_blocks: int, device: torch.device, groups: int
    ) -> None:
        on_card = device.type == "cuda"
        self.host = torch.zeros(words, dtype=torch.int64, pin_memory=on_card)
        self.device = torch.zeros(words, dtype=torch.int64, device=device)
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

    def move(self, words: int, sequences: int, input_ids: Tensor) -> None:
        """Begin to move so many words and rows of block tables to the device.

        ``input_ids`` are the first words where they are on the device already, as the step before
        has drawn them.
        """
        self.device[:words].copy_(self.host[:words], non_blocking=True)
        if input_ids.device.type != "cpu":
            self.device[: len(input_ids)] = input_ids
        for there, here in self._of_groups:
            there[:sequences].copy_(here[:sequences], non_blocking=True)
        if self._moved is not None:
            self._moved.record(_cuda.current_stream(self.device.device))
