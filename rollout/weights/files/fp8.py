"""Checkpoints in fp8, their linears scaled by block or whole, read as what they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights import CASTABLE, Box, Shape, TensorMeta

if TYPE_CHECKING:
    from rollout.weights.files import Files

WEIGHT = ".weight"
SCALES = ("_scale_inv", "_scale")  # either is what values are multiplied by
SCALE_DTYPES = CASTABLE | {torch.float8_e8m0fnu}
INPUT_SCALES = (".activation_scale", ".input_scale")  # of activations, which stay as they are
BLOCK = (128, 128)  # where no config.json says


class Fp8Files:
    """``X.weight`` [n, k] float8_e4m3fn is float32, its scales (``X.weight_scale_inv``) are gone.

    Scales are [ceil(n / rows), ceil(k / columns)] of the blocks that ``weight_block_size`` of the
    ``config.json`` in ``directory`` says; where it is null, one of the tensor, or [n, 1]. Values of
    a box are the float32 products that all of the tensor would have, and only the scales of blocks
    that it cuts are read. Other tensors are passed on. Raises ``ConfigError`` naming a weight whose
    scales are missing or of another shape.
    """

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        self._block = _block_size(directory / "config.json")
        held = files.metadata()
        self._scales = {n: self._scale_of(n, m, held) for n, m in held.items() if _is_fp8(m)}
        left_out = set(self._scales.values())
        for name in self._scales:
            left_out |= {name.removesuffix(WEIGHT) + end for end in INPUT_SCALES}
        self._metadata = {
            name: TensorMeta(name, torch.float32, m.shape) if name in self._scales else m
            for name, m in held.items()
            if name not in left_out
        }

    def metadata(self) -> Mapping[str, TensorMeta]:
        return self._metadata

    def read(self, name: str, box: Box) -> Tensor:
        scales = self._scales.get(name)
        values = self._files.read(name, box)
        if scales is None:
            return values
        held = self._files.metadata()
        shape = held[scales].shape
        block = _spans(held[name].shape, shape, self._block)
        if block is None:
            factor = self._files.read(scales, Box.full(shape)).float().reshape(())
            return values.float() * factor
        starts = tuple(a // b for a, b in zip(box.starts, block, strict=True))
        stops = tuple(-(-z // b) for z, b in zip(box.stops, block, strict=True))
        factors = self._files.read(scales, Box(starts, stops)).float()
        for axis, size in enumerate(block):
            places = torch.arange(box.starts[axis], box.stops[axis]) // size - starts[axis]
            factors = factors.index_select(axis, places)
        return factors.mul_(values.float())

    def close(self) -> None:
        self._files.close()

    def _scale_of(self, name: str, meta: TensorMeta, held: Mapping[str, TensorMeta]) -> str:
        for end in SCALES:
            found = held.get(name + end)
            if found is None:
                continue
            if found.dtype not in SCALE_DTYPES or not _fits(meta.shape, found.shape, self._block):
                break
            return found.name
        else:
            found = None
        wanted = "one scale, or one a row"
        if self._block is not None:
            shape = tuple(-(-n // b) for n, b in zip(meta.shape, self._block, strict=False))
            wanted = f"floats of shape {shape}, one a block of {list(self._block)}"
        got = "there is none" if found is None else f"{found.name} is {found.dtype} {found.shape}"
        raise ConfigError(
            f"{name} {meta.shape} is float8 and needs {name}{SCALES[0]}, {wanted}; {got}. Download "
            "the checkpoint again, or take one that is not quantised"
        )


def has_fp8(metadata: Mapping[str, TensorMeta]) -> bool:
    """Whether weights of linears among these are in float8."""
    return any(map(_is_fp8, metadata.values()))


def _is_fp8(meta: TensorMeta) -> bool:
    return meta.dtype == torch.float8_e4m3fn and meta.name.endswith(WEIGHT)


def _fits(shape: Shape, scales: Shape, block: tuple[int, int] | None) -> bool:
    if len(shape) != 2:
        return False
    if block is not None:
        return scales == (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    return scales in ((), (1,), (1, 1), (shape[0], 1))


def _spans(shape: Shape, scales: Shape, block: tuple[int, int] | None) -> tuple[int, int] | None:
    """The block that a scale is for; None where it is one for all."""
    if block is not None:
        return block
    return (1, max(1, shape[1])) if scales == (shape[0], 1) else None


def _block_size(config: Path) -> tuple[int, int] | None:
    """What a ``config.json`` says; None where scales are for whole tensors."""
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return BLOCK
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config} cannot be read as JSON: {error}") from error
    packed = values.get("quantization_config") if isinstance(values, Mapping) else None
    return block_size(packed, str(config)) if isinstance(packed, Mapping) else BLOCK


def block_size(packed: Mapping[str, object], file: str) -> tuple[int, int] | None:
    """``weight_block_size`` of a ``quantization_config``; ``file`` names it in errors."""
    found = packed.get("weight_block_size")
    if found is None:
        return None
    if (
        not isinstance(found, list | tuple)
        or len(found) != 2
        or not all(type(n) is int and n > 0 for n in found)
    ):
        raise ConfigError(
            f"{file}: weight_block_size must be two positive integers or null, got {found!r}"
        )
    return found[0], found[1]
