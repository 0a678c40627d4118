"""The vocabulary, split over ranks: token embedding and language-model head."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.models.layers.base import Build, Layer, rows_slot
from rollout.weights import PLAIN, Box, TileLayout, WeightSlot


class VocabParallel(Layer):
    """Rows of a ``[vocab, hidden]`` matrix: rank r holds the r-th equal part of the padded rows.

    The vocabulary is padded up to a multiple of the ranks (and of a tile's rows, in that layout);
    padding rows are declared, and zero.
    """

    weight: Tensor

    def __init__(self, build: Build, *, tiled: bool) -> None:
        super().__init__(build)
        config, tp = build.config, build.tp
        tiled = tiled and build.layout == "tiles" and config.hidden_size % 2 == 0
        multiple = tp.size * (TileLayout().rows if tiled else 1)
        self.rows = -(-config.vocab_size // multiple) * multiple // tp.size
        self.first = min(tp.rank * self.rows, config.vocab_size)
        self.count = min((tp.rank + 1) * self.rows, config.vocab_size) - self.first
        shape = (self.rows, config.hidden_size)
        padding = (Box((self.count, 0), shape),) if self.count < self.rows else ()
        self.declare("weight", shape, build.linear_layout(shape) if tiled else PLAIN, padding)

    def slots(self, prefix: str) -> list[WeightSlot]:
        shape = (self.build.config.vocab_size, self.build.config.hidden_size)
        name = f"{prefix}.weight"
        return [rows_slot(name, shape, self.first, self.count, name, 0)]

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab_size], gathered over ranks, padding cut off."""
        return self.build.tp.all_gather(self.matmul(hidden))[:, : self.build.config.vocab_size]


class Embedding(VocabParallel):
    """Token ids [T] -> [T, hidden]; one all-reduce. A tied one is also the head."""

    def __init__(self, build: Build) -> None:
        super().__init__(build, tiled=build.config.tied)

    def forward(self, ids: Tensor) -> Tensor:
        tp = self.build.tp
        if tp.size == 1:
            return self.lookup(ids)
        local = ids - self.first
        here = (local >= 0) & (local < self.count)
        rows = self.lookup(torch.where(here, local, 0))
        return tp.all_reduce(rows.masked_fill_(~here[:, None], 0))

    def lookup(self, rows: Tensor) -> Tensor:
        """Rows of this rank's part, in either layout, as a fresh tensor."""
        layout, weight = self.specs["weight"].layout, self.weight
        if isinstance(layout, TileLayout):
            return weight[rows // layout.rows, :, rows % layout.rows].flatten(1)
        return weight.index_select(0, rows)


class Head(VocabParallel):
    """An untied language-model head."""

    def __init__(self, build: Build) -> None:
        super().__init__(build, tiled=True)
