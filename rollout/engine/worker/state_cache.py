"""The recurrent states of one rank's sequences, beside its KV pages."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor

from rollout.distributed.stage import Stage
from rollout.engine.memory import to_device
from rollout.errors import ConfigError
from rollout.kernels import copy_slots
from rollout.models.config.model import ModelConfig
from rollout.models.config.stage_layers import own_layers
from rollout.models.forward import LayerKV


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """What one slot holds on this rank, in each of ``layers``: of one sequence or snapshot."""

    layers: tuple[int, ...]  # their numbers, from the stage's first one on
    inputs: tuple[int, ...]  # of a convolution, in ``dtype``
    state: tuple[int, ...]  # float32: what is rounded would differ by how often it was stored
    dtype: torch.dtype

    @classmethod
    def of(
        cls, model: ModelConfig, ranks: int, dtype: torch.dtype, stage: Stage | None = None
    ) -> Self:
        """Of each of the ``ranks`` of a stage; slots of no bytes where no layer has a state."""
        sizes = model.recurrence
        inputs, state = ((), ()) if sizes is None else sizes.state_shapes(ranks)
        layers = own_layers(model, stage or Stage(), model.recurrent_layers)
        return cls(layers=layers, inputs=inputs, state=state, dtype=dtype)

    @property
    def slot_bytes(self) -> int:
        each = prod(self.inputs) * self.dtype.itemsize + prod(self.state) * 4
        return len(self.layers) * each


class StateCache:
    """Allocates the slots, copies one to another, and drops and takes them around a sleep.

    Contents are uninitialised and do not survive a sleep. Addresses are fixed while allocated.
    """

    def __init__(self, shape: StateShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.num_slots = 0
        self.layers: dict[int, LayerKV] = {}
        self._whole: tuple[Tensor, ...] = ()  # of all layers, [layers, slots, ...]

    def allocate(self, num_slots: int) -> None:
        """Take ``num_slots`` slots in place of any there were."""
        shape = self.shape
        self.free()
        try:
            size = len(shape.layers), num_slots
            inputs = torch.empty((*size, *shape.inputs), dtype=shape.dtype, device=self.device)
            self._whole = inputs, torch.empty((*size, *shape.state), device=self.device)
        except RuntimeError as error:
            self.free()
            need = num_slots * shape.slot_bytes
            raise ConfigError(
                f"no memory for the states of {num_slots} sequences ({need / 2**20:.0f} MiB); set "
                f"a smaller state_cache_bytes or max_num_seqs ({error})"
            ) from error
        parts = zip(shape.layers, *self._whole, strict=True)
        self.layers = {layer: LayerKV(inputs, state) for layer, inputs, state in parts}
        self.num_slots = num_slots

    def free(self) -> None:
        """Drop the slots; ``num_slots`` remembers how many to take again."""
        self.layers, self._whole = {}, ()

    def copy(self, pairs: Tensor | None) -> None:
        """Each of the ``pairs`` [n, 2] of slots (from, to): none is in both columns, and none is
        copied to twice."""
        if pairs is None or not len(pairs):
            return
        there = to_device(pairs, self.device).long()
        for states in self._whole:
            copy_slots(states, there)
