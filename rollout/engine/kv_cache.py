"""The pages of one rank's KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.errors import ConfigError, EngineClosed
from rollout.models.forward import LayerKV


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What one block holds on this rank: keys and values of ``block_size`` positions."""

    num_layers: int
    kv_heads: int  # of this rank
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        elements = self.kv_heads * self.block_size * self.head_dim
        return 2 * self.num_layers * elements * self.dtype.itemsize


class KVCache:
    """Allocates the pages, and drops and takes them again around a sleep.

    Contents are uninitialised and do not survive a sleep. Allocated once, not per step.
    """

    def __init__(self, shape: KVShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.num_blocks = 0
        self._layers: list[LayerKV] = []

    @property
    def layers(self) -> list[LayerKV]:
        """One entry per layer; ``EngineClosed`` while there are none."""
        if not self._layers:
            raise EngineClosed("this rank has no KV cache: the engine is asleep or not started")
        return self._layers

    def allocate(self, num_blocks: int) -> None:
        """Take ``num_blocks`` blocks in place of any there were."""
        shape = self.shape
        self.free()
        pages = (num_blocks, shape.kv_heads, shape.block_size, shape.head_dim)
        try:
            self._layers = [
                LayerKV(*(torch.empty(pages, dtype=shape.dtype, device=self.device) for _ in "kv"))
                for _ in range(shape.num_layers)
            ]
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self.free()
            need = num_blocks * shape.block_bytes
            raise ConfigError(
                f"no memory for {num_blocks} KV blocks ({need / 2**20:.0f} MiB); set a smaller "
                f"kv_cache_bytes or num_kv_blocks ({error})"
            ) from error
        self.num_blocks = num_blocks

    def free(self) -> None:
        """Drop the pages; ``num_blocks`` remembers how many to take again."""
        self._layers = []

    def restore(self) -> None:
        """After ``free``: take as many blocks as before."""
        if not self._layers and self.num_blocks:
            self.allocate(self.num_blocks)
