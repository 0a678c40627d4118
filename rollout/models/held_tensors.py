"""Weights that are held and never run: of a head or draft of an architecture unknown here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor, nn

from rollout.errors import ConfigError
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build
from rollout.models.model import Model
from rollout.models.weight_io.table import ParamSpec, WeightTable
from rollout.weights import CASTABLE, PLAIN, Box, TensorMeta, WeightSlot
from rollout.weights.names import weight_dtype
from rollout.weights.spellings import Spellings


class HeldTensors(Model):
    """A checkpoint's tensors as its files have them, whole on every rank, in the engine's dtype.

    Those that are no floats (index maps between vocabularies) are constants and stay in the files:
    a source may send them, and they are passed over. ``prefixes``: of other tensors of the same
    files, too (``weights.names.placed``). ``constants``: as of ``Model``.
    """

    def __init__(
        self,
        build: Build,
        tensors: Sequence[TensorMeta],
        prefixes: Mapping[str, str] = MappingProxyType({}),
        constants: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        super().__init__(build, 0)
        self.constants = constants
        self._tensors, self._prefixes = tuple(tensors), dict(prefixes)
        held = [meta for meta in self._tensors if meta.dtype in CASTABLE]
        if not held:
            raise ConfigError("the files of a component hold no floating-point tensor")
        slots, params = {}, {}
        for index, meta in enumerate(held):
            param, whole = f"t{index}", Box.full(meta.shape)
            dtype = weight_dtype(meta.name, build.dtype)
            storage = torch.empty(meta.shape, dtype=dtype, device=build.device)
            self.register_parameter(param, nn.Parameter(storage, requires_grad=False))
            params[param] = ParamSpec(meta.shape, PLAIN)
            slots[meta.name] = (WeightSlot(meta.name, meta.shape, whole, param, whole),)
        self.table = WeightTable(
            slots,
            params,
            {},
            spellings=Spellings.of({meta.name: meta.shape for meta in held}),
            prefixes={m.name: "" for m in self._tensors if m.dtype not in CASTABLE}
            | self._prefixes,
        )
        self.eval()

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        raise NotImplementedError("held weights are not run")

    def empty_like(self) -> Self:
        return type(self)(self.build, self._tensors, self._prefixes, self.constants)
