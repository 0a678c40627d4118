"""The vocabulary, split over ranks: token embedding and language-model head."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels import batch_invariant_linear, linear
from rollout.models.layers.base import Adapters, Build, Layer, rows_slot, storage_of
from rollout.weights import PLAIN, Box, TileLayout, WeightSlot

WIDENED = 1 << 20  # weights of the head that are widened at once: they stay in the caches


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

    @property
    def head_bias(self) -> Tensor | None:
        """This rank's part of what is added to the logits."""
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab_size], gathered over ranks, padding cut off."""
        wide = self.build.head_dtype not in (None, self.build.dtype)
        bias = self.head_bias
        if wide:
            part = self.adapted(self.wide_logits(hidden), hidden.to(self.build.head_dtype))
            part = part if bias is None else part + bias.to(part.dtype)
        else:
            part = self.matmul(hidden, bias)
        return self.build.tp.all_gather(part)[:, : self.build.config.vocab_size]

    def wide_logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits in the head's dtype, multiplied and summed in it.

        The weights are widened a few rows at a time: no copy of them is kept, so an update needs
        nothing more, and a tied embedding stays as it is.
        """
        layout, dtype = self.specs["weight"].layout, self.build.head_dtype
        run = batch_invariant_linear if self.build.deterministic else linear
        inputs = hidden.to(dtype)
        logits = hidden.new_empty(len(hidden), self.rows, dtype=dtype)
        step = max(TileLayout().rows, WIDENED // hidden.shape[1] // 16 * 16)
        for first in range(0, self.rows, step):
            box = Box((first, 0), (min(first + step, self.rows), hidden.shape[1]))
            weight = layout.read(storage_of(self, "weight"), self.specs["weight"].shape, box)
            shape = (box.shape[0], box.shape[1])
            out = run(inputs, weight.to(dtype), None, PLAIN, shape)
            logits[:, first : first + step] = out
        return logits


class Embedding(VocabParallel):
    """Token ids [T] -> [T, hidden]; one all-reduce. A tied one is also the head.

    ``adapters`` are those of the head; ``lookup_adapters`` of the lookup itself.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build, tiled=build.config.tied)
        self.lookup_adapters: Adapters | None = None

    def forward(self, ids: Tensor) -> Tensor:
        tp = self.build.tp
        if tp.size == 1:
            return self._adapted_rows(ids)
        local = ids - self.first
        here = (local >= 0) & (local < self.count)
        rows = self._adapted_rows(torch.where(here, local, 0)).masked_fill_(~here[:, None], 0)
        if self.build.deterministic:  # a sum with zeros; in bfloat16 it may lose the tiniest values
            return tp.tree_sum(rows.float()).to(rows.dtype)
        return tp.all_reduce(rows)

    def _adapted_rows(self, ids: Tensor) -> Tensor:
        rows, beside = self.lookup(ids), self.lookup_adapters
        return rows if beside is None or beside.is_idle else beside.scale(beside.add(rows, ids))

    def lookup(self, rows: Tensor) -> Tensor:
        """Rows of this rank's part, in either layout, as a fresh tensor."""
        layout, weight = self.specs["weight"].layout, self.weight
        if isinstance(layout, TileLayout):
            return weight[rows // layout.rows, :, rows % layout.rows].flatten(1)
        return weight.index_select(0, rows)


class Head(VocabParallel):
    """An untied language-model head; with a bias [vocab] where the config has one."""

    bias: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__(build, tiled=True)
        if build.config.head_bias:
            rest = (Box((self.count,), (self.rows,)),) if self.count < self.rows else ()
            self.declare("bias", (self.rows,), padding=rest)

    @property
    def head_bias(self) -> Tensor | None:
        return storage_of(self, "bias") if self.build.config.head_bias else None

    def slots(self, prefix: str) -> list[WeightSlot]:
        found = super().slots(prefix)
        if self.build.config.head_bias:
            name, shape = f"{prefix}.bias", (self.build.config.vocab_size,)
            found.append(rows_slot(name, shape, self.first, self.count, name, 0))
        return found
