"""Quantised weights that a trainer holds: codes and scales, each a tensor of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rollout.errors import WeightMismatch, some
from rollout.weight_sync.trainer.sources.names import Naming
from rollout.weights.box import Box
from rollout.weights.expert_names import expert_part
from rollout.weights.files import mxfp4
from rollout.weights.files.packed_int import ACTIVATIONS, QWEIGHT, WEIGHT_PACKED
from rollout.weights.files.scaled import BLOCK, SCALES, WEIGHT
from rollout.weights.packed_rows import (
    CODES,
    floats_of,
    pack_rows,
    row_scales,
    scale_grid,
    scheme_of,
)
from rollout.weights.quantization import MXFP4, Scheme

PACKED_WORDS = (QWEIGHT, WEIGHT_PACKED)


def holds_codes(items: Iterable[tuple[str, Tensor]]) -> bool:
    """Whether weights of linears are codes in there."""
    plain = (Tensor, torch.nn.Parameter)  # others may not answer, and are refused by name
    return any(
        type(tensor) in plain and (name.endswith(PACKED_WORDS) or _is_codes(name, tensor))
        for name, tensor in items
    )


def with_codes(items: Iterable[tuple[str, Tensor]], naming: Naming) -> Iterator[tuple[str, Tensor]]:
    """``X.weight`` of float8_e4m3fn or int8 and its scales (``X.weight_scale_inv``, or ``_scale``)
    as one tensor, ``X_blocks`` and ``X_scales`` of experts in mxfp4 as one of each expert; others
    as they come, but for what scales activations, unless the engine has a tensor of that name.

    Where the engine holds X in that very grid (``naming.schemes``), codes and scales in bytes
    (``packed_rows``); else the floats that they stand for. Whichever comes first is copied until
    the other does. Raises ``WeightMismatch`` where one never comes, or they do not fit, and for
    codes that are packed in int32, of which names and shapes do not say the form.
    """
    waiting: dict[str, tuple[str, Tensor, bool]] = {}
    for name, tensor in items:
        if name.endswith(PACKED_WORDS):
            wrong = (
                f"{name} is packed, as GPTQ, AWQ and compressed-tensors do it: pass the directory "
                "of its files, whose config.json says how, or dequantise it first"
            )
            raise WeightMismatch(wrong, problems=[wrong])
        is_codes = _is_codes(name, tensor)
        stem = _stem(name) if is_codes else _scaled_by(name, tensor)
        if stem is None:
            if not name.endswith(ACTIVATIONS) or name in naming.known:
                yield name, tensor
            continue
        if stem not in waiting:
            waiting[stem] = name, tensor.detach().clone(), is_codes
            continue
        _, other, was_codes = waiting.pop(stem)
        if was_codes == is_codes:
            raise WeightMismatch(f"{name}: was sent twice")
        codes, scales = (tensor, other) if is_codes else (other, tensor)
        if codes.dtype == torch.uint8:
            yield from _experts(stem, codes, scales.to(codes.device), naming)
        else:
            yield stem, _together(stem, codes, scales, naming.schemes.get(stem))
    if waiting:
        wanted = "" if naming.dtype is None else f", the model wants {naming.dtype},"
        named = [
            f"{name} has dtype {tensor.dtype}{wanted} and came without its {_scales_of(name)}"
            if is_codes
            else f"{name} came without its {stem}"
            for stem, (name, tensor, is_codes) in waiting.items()
        ]
        raise WeightMismatch(
            f"{some(named, between='; ')}: quantised values mean nothing without their "
            "scales; send both, or dequantise it first",
            problems=named,
        )


def _is_codes(name: str, tensor: Tensor) -> bool:
    if tensor.dtype == torch.uint8:
        return name.endswith(mxfp4.BLOCKS)
    return tensor.dtype in CODES and name.endswith(WEIGHT)


def _stem(name: str) -> str:
    """The weight that codes of this name are of."""
    return name.removesuffix(mxfp4.BLOCKS)


def _scales_of(name: str) -> str:
    """What the scales of codes of this name are called."""
    stem = _stem(name)
    return f"{stem}{SCALES[0] if stem == name else mxfp4.SCALES}"


def _scaled_by(name: str, tensor: Tensor) -> str | None:
    """The weight that a tensor of this name scales, or None."""
    if tensor.dtype == torch.uint8 and name.endswith(mxfp4.SCALES):
        return name.removesuffix(mxfp4.SCALES)
    for end in SCALES:
        if name.endswith(WEIGHT + end):
            return name.removesuffix(end)
    return None


def _experts(
    name: str, blocks: Tensor, scales: Tensor, naming: Naming
) -> Iterator[tuple[str, Tensor]]:
    """Blocks [E, n, g, 16] and scales [E, n, g] of stacked experts."""
    if blocks.dim() != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
        raise WeightMismatch(
            f"{name}{mxfp4.BLOCKS} {tuple(blocks.shape)} came with scales of shape "
            f"{tuple(scales.shape)}: mxfp4 experts have [experts, rows, groups, 16] and one scale "
            "a group; dequantise it first"
        )
    if naming.schemes.get(expert_part(name, 0)) is not MXFP4:
        yield name, mxfp4.unpacked(blocks, scales).transpose(1, 2)
        return
    for index, (codes, powers) in enumerate(zip(blocks, scales, strict=True)):
        yield expert_part(name, index), pack_rows(codes.flatten(1), powers)


def _together(name: str, codes: Tensor, scales: Tensor, scheme: Scheme | None) -> Tensor:
    shape = tuple(codes.shape)
    grids = (scale_grid(shape, tuple(scales.shape), block) for block in (None, BLOCK))
    grid = next((found for found in grids if found is not None), None)
    if grid is None:
        raise WeightMismatch(
            f"{name} {shape} came with scales of shape {tuple(scales.shape)}: they are of the "
            f"tensor, of its rows or of blocks of {list(BLOCK)}; dequantise it first"
        )
    scales = scales.to(codes.device)
    if scheme is not None and scheme in scheme_of(codes.dtype, shape, grid):
        return pack_rows(codes, row_scales(scales, shape, grid, scheme))
    wide = scales.float()
    if grid != (0, 0):
        wide = wide.reshape(-1, -(-shape[1] // grid[1]))
    return floats_of(codes, wide, grid, Box.full(shape))
