"""Made-up weights: for benchmarks, and to start an engine that a trainer will fill."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.weights import Box, TensorMeta

CHUNK = 1 << 16  # elements, on a CPU: several passes are made over what stays in its cache
CHUNK_THERE = 1 << 25  # on a device: few launches
SPREAD = 0.05  # values are uniform in -SPREAD..SPREAD; norm weights around one
_MIX = 0x2C1B3C6D  # odd, positive int32 multiplier of the "lowbias32" family


class DummyFiles:
    """Values that depend on seed, name and position alone: any two boxes agree where they meet."""

    def __init__(self, metadata: Sequence[TensorMeta], seed: int, device: str = "cpu") -> None:
        self._metadata = {meta.name: meta for meta in metadata}
        self._seed, self._device = seed, device
        self._chunk = CHUNK if device == "cpu" else CHUNK_THERE

    def metadata(self) -> dict[str, TensorMeta]:
        return self._metadata

    def read(self, name: str, box: Box) -> Tensor:
        out = torch.empty(box.shape, dtype=self._metadata[name].dtype, device=self._device)
        lanes = []
        for axis, (start, stop) in enumerate(zip(box.starts, box.stops, strict=True)):
            # One salt per axis, so that (1, 2) and (2, 1) differ.
            where = torch.arange(start, stop, dtype=torch.int32, device=self._device)
            where += _salt(self._seed, name, axis)
            shape = [-1 if i == axis else 1 for i in range(len(box.shape))]
            lanes.append(_scramble(where).reshape(shape))
        centre = 1.0 if name.split(".")[-2:-1] and name.split(".")[-2].endswith("norm") else 0.0
        if not lanes or not out.numel():
            return out.fill_(centre)
        rows = max(1, self._chunk * box.shape[0] // box.numel)
        none = torch.zeros((), dtype=torch.int32, device=self._device)
        for part, first in zip(torch.split(out, rows), torch.split(lanes[0], rows), strict=True):
            mixed = first + sum(lanes[1:], none)
            part.copy_(_scramble(mixed).float().mul_(SPREAD / 2**31).add_(centre))
        return out

    def close(self) -> None:
        """Nothing is open."""


def _salt(seed: int, name: str, axis: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{axis}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 2


def _scramble(x: Tensor) -> Tensor:
    """A bijection of int32 that spreads neighbours apart; products wrap around."""
    x = x ^ _shifted(x, 15)
    x *= _MIX
    x ^= _shifted(x, 13)
    x *= _MIX
    x ^= _shifted(x, 16)
    return x


def _shifted(x: Tensor, by: int) -> Tensor:
    """A logical right shift; torch's own copies the sign bit down."""
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)
