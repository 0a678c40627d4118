"""Checkpoints in fp8 or int8, their linears scaled by block, row or whole: as what they stand for,
or as their codes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights import CASTABLE, Box, TensorMeta
from rollout.weights.files.packed_int import (
    ACTIVATIONS,
    COMPRESSED,
    PACKED,
    is_packed_config,
    quantization_config,
)
from rollout.weights.packed_rows import (
    CODES,
    FileCodes,
    floats_of,
    row_scales,
    scale_grid,
    scheme_of,
)
from rollout.weights.quantization import MXFP4, Scheme

if TYPE_CHECKING:
    from rollout.weights.files import Files

WEIGHT = ".weight"
SCALES = ("_scale_inv", "_scale")  # either is what values are multiplied by
BITSANDBYTES = ".SCB"  # its scales
SCALE_DTYPES = CASTABLE | {torch.float8_e8m0fnu}
BLOCK = (128, 128)  # where no config.json says
Block = tuple[int, int]


class ScaledFiles:
    """``X.weight`` [n, k] of float8_e4m3fn or int8 is float32, its scales (``X.weight_scale_inv``)
    are gone.

    Scales are [ceil(n / rows), ceil(k / columns)] of the blocks that the ``config.json`` in
    ``directory`` says; where it has none, one of the tensor, or [n, 1]; any of these, blocks being
    of 128 x 128, where no ``quantization_config`` says anything. Values of a box are the float32
    products that all of the tensor would have, and only the scales of blocks that it cuts are read.
    Other tensors are passed on. Raises ``ConfigError`` naming a weight whose scales are missing or
    of another shape.
    """

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        self._blocks = _block_sizes(directory / "config.json")
        held = files.metadata()
        self._scales = {n: self._scale_of(n, m, held) for n, m in held.items() if _has_codes(m)}
        left_out = {scales for scales, _ in self._scales.values()}
        self._metadata = {
            name: TensorMeta(name, torch.float32, m.shape) if name in self._scales else m
            for name, m in held.items()
            if name not in left_out and not name.endswith(ACTIVATIONS)
        }

    def metadata(self) -> Mapping[str, TensorMeta]:
        return self._metadata

    def read(self, name: str, box: Box) -> Tensor:
        values = self._files.read(name, box)
        if name not in self._scales:
            return values
        scales, grid = self._scales[name]
        cut = self._whole(scales, *grid, box) if grid[0] else self._whole(scales)
        return floats_of(values, cut, grid, box)

    def codes(self, name: str) -> tuple[FileCodes, ...]:
        """The codes of a weight, in each scheme that can hold them as they are."""
        if name not in self._scales:
            return ()
        meta = self._files.metadata()[name]
        grid = self._scales[name][1]
        return tuple(
            FileCodes(scheme, partial(self._read_codes, name, scheme))
            for scheme in scheme_of(meta.dtype, meta.shape, grid)
        )

    def _read_codes(self, name: str, scheme: Scheme, box: Box) -> tuple[Tensor, Tensor]:
        shape, (scales, grid) = self._files.metadata()[name].shape, self._scales[name]
        found = row_scales(self._whole(scales), shape, grid, scheme)
        columns = scheme.cell(shape)[1]
        cells = slice(box.starts[1] // columns, -(-box.stops[1] // columns))
        codes = self._files.read(name, box).contiguous().view(scheme.storage_dtype)
        return codes, found[box.slices[0], cells]

    def _whole(
        self, scales: str, rows: int = 0, columns: int = 0, box: Box | None = None
    ) -> Tensor:
        """Scales in float32: all of them, or those of the blocks that ``box`` cuts."""
        shape = self._files.metadata()[scales].shape
        part = Box.full(shape)
        if box is not None:
            starts = (box.starts[0] // rows, box.starts[1] // columns)
            stops = (-(-box.stops[0] // rows), -(-box.stops[1] // columns))
            part = Box(starts[: len(shape)], stops[: len(shape)])
        found = self._files.read(scales, part).float()
        return found[:, None] if len(shape) == 1 and rows else found

    def close(self) -> None:
        self._files.close()

    def _scale_of(
        self, name: str, meta: TensorMeta, held: Mapping[str, TensorMeta]
    ) -> tuple[str, tuple[int, int]]:
        for end in SCALES:
            found = held.get(name + end)
            if found is None:
                continue
            grids = (scale_grid(meta.shape, found.shape, block) for block in self._blocks)
            grid = next((one for one in grids if one is not None), None)
            if found.dtype not in SCALE_DTYPES or grid is None:
                break
            return found.name, grid
        else:
            found = None
        if found is None and (theirs := name.removesuffix(WEIGHT) + BITSANDBYTES) in held:
            raise ConfigError(
                f"{name} is bitsandbytes' int8, scaled by {theirs}, which is not supported: use an "
                "unquantised checkpoint"
            )
        wanted = "one scale, or one a row"
        block = self._blocks[-1]
        if block is not None:
            shape = tuple(-(-n // b) for n, b in zip(meta.shape, block, strict=False))
            wanted = f"floats of shape {shape}, one a block of {list(block)}"
        got = "there is none" if found is None else f"{found.name} is {found.dtype} {found.shape}"
        kind = "float8" if meta.dtype == torch.float8_e4m3fn else "int8"
        raise ConfigError(
            f"{name} {meta.shape} is {kind} and needs {name}{SCALES[0]}, {wanted}; {got}. Download "
            "the checkpoint again, or take one that is not quantised"
        )


def has_codes(metadata: Mapping[str, TensorMeta]) -> bool:
    """Whether weights of linears among these are in float8 or int8."""
    return any(map(_has_codes, metadata.values()))


def _has_codes(meta: TensorMeta) -> bool:
    return meta.dtype in CODES and meta.name.endswith(WEIGHT)


def _block_sizes(config: Path) -> tuple[Block | None, ...]:
    """What a ``config.json`` says, or all that may be; None: scales are for rows or tensors."""
    packed = quantization_config(config)
    return (None, BLOCK) if packed is None else (block_size(packed, str(config)),)


def scheme_name(packed: Mapping[str, object] | None, file: str) -> str:
    """The scheme that a ``quantization_config`` says of linears, "none" where none is its grid.

    (mxfp4 is of the experts alone, see ``StackedArch.alone_in``.)
    """
    method = None if packed is None else packed.get("quant_method")
    if method == MXFP4.name:
        return MXFP4.name
    if packed is None or is_packed_config(packed) or method not in ("fp8", COMPRESSED):
        return "none"
    if method == COMPRESSED and not packed.get("config_groups"):  # of the cache alone
        return "none"
    block = block_size(packed, file)
    if method == COMPRESSED and _weights(packed)[0].get("type") == "int":
        return "none" if block else "int8"
    return "fp8" if block is None else "fp8_block" if block == BLOCK else "none"


def block_size(packed: Mapping[str, object], file: str) -> Block | None:
    """The block of a ``quantization_config``, None where there is none; ``file`` names it in
    errors."""
    if packed.get("quant_method") == COMPRESSED:
        return _compressed(packed, file)
    return _pair(packed.get("weight_block_size"), "weight_block_size", file)


def _compressed(packed: Mapping[str, object], file: str) -> Block | None:
    """As compressed-tensors says it, by groups of modules, of which one grid is read."""
    found = set()
    if not packed.get("config_groups"):
        return None
    for weights in _weights(packed):
        strategy, bits = weights.get("strategy"), weights.get("num_bits")
        if bits != 8 or strategy not in ("tensor", "channel", "block"):
            raise ConfigError(
                f"{file}: compressed-tensors in format {packed.get('format')!r} with weights of "
                f"{bits} bits by {strategy} is not supported; use a checkpoint in 8 bits (int8 or "
                f"fp8) by channel, block or tensor, or in {PACKED}"
            )
        if not weights.get("symmetric", True):
            raise ConfigError(
                f"{file}: compressed-tensors with zero points is not supported; use a symmetric one"
            )
        structure = weights.get("block_structure") if strategy == "block" else None
        found.add((weights.get("type"), _pair(structure, "block_structure", file)))
    if len(found) != 1:
        raise ConfigError(
            f"{file}: config_groups of compressed-tensors must say one grid of weights, got "
            f"{len(found)}; use a checkpoint quantised in one"
        )
    return found.pop()[1]


def _weights(packed: Mapping[str, object]) -> list[Mapping[str, object]]:
    """What compressed-tensors says of the weights of each group."""
    groups = packed.get("config_groups")
    held = (
        [g.get("weights") for g in groups.values() if isinstance(g, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    return [weights for weights in held if isinstance(weights, Mapping)]


def _pair(found: object, name: str, file: str) -> Block | None:
    if found is None:
        return None
    if (
        not isinstance(found, list | tuple)
        or len(found) != 2
        or not all(type(n) is int and n > 0 for n in found)
    ):
        raise ConfigError(f"{file}: {name} must be two positive integers or null, got {found!r}")
    return found[0], found[1]
