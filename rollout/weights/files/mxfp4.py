"""Checkpoints whose experts are packed in mxfp4: as the bfloat16 that they stand for, or as their
codes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights import Box, Shape, TensorMeta
from rollout.weights.packed_rows import FileCodes
from rollout.weights.quantization import MXFP4

if TYPE_CHECKING:
    from rollout.weights.files import Files

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32  # elements that share a scale: two to a byte, the low half first
BIAS = 127  # of a scale's exponent
# What the 16 codes stand for: sign, two bits of exponent, one of mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4Files:
    """``X_blocks`` [E, N, G, 16] and ``X_scales`` [E, N, G] become ``X`` [E, 32 G, N], bfloat16.

    So gpt-oss is released: the last two dimensions are those of the plain tensor, exchanged. Other
    tensors are passed on. Reads the groups that a box cuts, and no others. Format: OCP
    Microscaling Formats, section 5.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._metadata = dict(_plain(files.metadata()))

    def metadata(self) -> Mapping[str, TensorMeta]:
        return self._metadata

    def read(self, name: str, box: Box) -> Tensor:
        if f"{name}{BLOCKS}" not in self._files.metadata():
            return self._files.read(name, box)
        (e0, k0, n0), (e1, k1, n1) = box.starts, box.stops
        g0, g1 = k0 // GROUP, -(-k1 // GROUP)
        packed = self._packed(name, Box((e0, n0, g0), (e1, n1, g1)))
        start = k0 - g0 * GROUP
        return unpacked(*packed)[:, :, start : start + k1 - k0].transpose(1, 2)

    def codes(self, name: str) -> tuple[FileCodes, ...]:
        """Of stacked experts, whose boxes [1, 32 g, n] are codes [n, 16 g] and scales [n, g]."""
        if f"{name}{BLOCKS}" not in self._files.metadata():
            return ()
        return (FileCodes(MXFP4, partial(self._read_codes, name)),)

    def _read_codes(self, name: str, box: Box) -> tuple[Tensor, Tensor]:
        (e0, k0, n0), (e1, k1, n1) = box.starts, box.stops
        groups = Box((e0, n0, k0 // GROUP), (e1, n1, k1 // GROUP))
        blocks, scales = self._packed(name, groups)
        return blocks.flatten(2).squeeze(0), scales.squeeze(0)

    def _packed(self, name: str, groups: Box) -> tuple[Tensor, Tensor]:
        """Blocks [e, n, g, 16] and scales [e, n, g] of these groups."""
        whole = Box((*groups.starts, 0), (*groups.stops, GROUP // 2))
        return (
            self._files.read(f"{name}{BLOCKS}", whole),
            self._files.read(f"{name}{SCALES}", groups),
        )

    def close(self) -> None:
        self._files.close()


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Codes [..., G, 16] uint8 and scales [..., G] uint8 -> values [..., 32 G] bfloat16, exact."""
    signed = (*_VALUES, *(-value for value in _VALUES))
    values = torch.tensor(signed, dtype=torch.bfloat16, device=blocks.device)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).int()  # [..., G, 32]
    powers = scales.int()[..., None] - BIAS
    return torch.ldexp(values[pairs], powers).to(torch.bfloat16).flatten(-2)


def is_packed(metadata: Mapping[str, TensorMeta]) -> bool:
    """Whether tensors of that form are among these."""
    return any(
        name.endswith(BLOCKS) and meta.dtype == torch.uint8 for name, meta in metadata.items()
    )


def _plain(metadata: Mapping[str, TensorMeta]) -> list[tuple[str, TensorMeta]]:
    found = []
    for name, meta in metadata.items():
        stem = name.removesuffix(BLOCKS)
        if name.endswith(SCALES) and f"{name.removesuffix(SCALES)}{BLOCKS}" in metadata:
            continue
        if stem == name or meta.dtype != torch.uint8:
            found.append((name, meta))
            continue
        scales = metadata.get(f"{stem}{SCALES}")
        groups: Shape = meta.shape[:-1]
        if scales is None or scales.shape != groups or (len(groups), meta.shape[-1]) != (3, 16):
            raise ConfigError(
                f"{name} of shape {meta.shape} needs {stem}{SCALES} of shape {groups}, as mxfp4 "
                "experts have; download the checkpoint again"
            )
        experts, rows, count = groups
        shape = (experts, count * GROUP, rows)
        found.append((stem, TensorMeta(stem, torch.bfloat16, shape)))
    return found
