"""``quantized_linear`` on a CPU: int8 and float8 in tiles natively, int8 in rows by torch's
``_int_mm``."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels.linear.cpu import level
from rollout.kernels.native import entry
from rollout.kernels.quantized_linear import plain_codes, quantize_rows
from rollout.kernels.quantized_linear import quantized_linear as op
from rollout.kernels.silu_mul import silu_mul
from rollout.weights import Layout, TileLayout
from rollout.weights.quantization import Scheme

TILE = (16, 4)  # rows and inputs


def quantized_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    layout: Layout,
    shape: tuple[int, int],
    scheme: Scheme,
    gated: bool = False,
) -> Tensor:
    """Four bits, and what is not in tiles, are dequantised for every product, as the reference
    does."""
    if takes(x, bias, layout, scheme) and shape[0] % (32 if gated else 16) == 0:
        run = _multiply_tiles if scheme.codes == "int8" else _float8
        return run(x, codes, scales, bias, shape, scheme, gated)
    if scheme.codes != "int8" or not x.numel():
        return op.reference(x, codes, scales, bias, layout, shape, scheme, gated)
    quantized, factors = quantize_rows(x, scheme)
    plain = plain_codes(codes, layout, shape, scheme)
    sums = torch._int_mm(quantized.reshape(-1, shape[1]), plain.t())
    out = sums.view(*x.shape[:-1], shape[0]) * (factors * scales[:, 0])
    out = (out if bias is None else out.add_(bias)).to(x.dtype)
    return silu_mul(out) if gated else out


def takes(x: Tensor, bias: Tensor | None, layout: Layout, scheme: Scheme) -> bool:
    """Whether the native code is made for these arguments."""
    tiles = isinstance(layout, TileLayout) and (layout.rows, layout.inputs) == TILE
    alike = x.dtype == torch.bfloat16 and (bias is None or bias.dtype == x.dtype)
    return tiles and alike and scheme.codes in ("int8", "e4m3") and x.shape[-1] > 0


def _multiply_tiles(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    shape: tuple[int, int],
    scheme: Scheme,
    gated: bool,
) -> Tensor:
    n, k = shape
    assert x.shape[-1] == k, f"x {x.shape} does not fit a weight of shape {shape}"
    flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, k).contiguous()
    out = torch.empty((*x.shape[:-1], n // 2 if gated else n), dtype=x.dtype)
    if out.numel():
        entry("int8_linear")(
            *(flat.data_ptr(), flat.stride(0), codes.data_ptr(), scales.data_ptr()),
            *(None if bias is None else bias.data_ptr(), out.data_ptr(), len(flat), n, k, gated),
            torch.get_num_threads(),
        )
    return out


def _float8(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    shape: tuple[int, int],
    scheme: Scheme,
    gated: bool,
) -> Tensor:
    """Of scales of rows the inputs are codes, too, and scales and bias come behind the sums."""
    if scheme.columns:
        return _float8_tiles(x, codes, scales, bias, shape, scheme, gated)
    quantized, factors = quantize_rows(x, scheme)
    out = _float8_tiles(quantized.to(x.dtype), codes, None, None, shape, scheme, False, wide=True)
    out.mul_(factors).mul_(scales[:, 0])
    out = (out if bias is None else out.add_(bias)).to(x.dtype)
    return silu_mul(out) if gated else out


def _float8_tiles(
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, int],
    scheme: Scheme,
    gated: bool,
    wide: bool = False,
) -> Tensor:
    """``wide``: float32 sums."""
    n, k = shape
    assert x.shape[-1] == k, f"x {x.shape} does not fit a weight of shape {shape}"
    flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, k).contiguous()
    dtype = torch.float32 if wide else x.dtype
    out = torch.empty((*x.shape[:-1], n // 2 if gated else n), dtype=dtype)
    if out.numel():
        entry("float8_linear")(
            *(flat.data_ptr(), flat.stride(0), codes.data_ptr()),
            *(None if each is None else each.data_ptr() for each in (scales, bias)),
            *(out.data_ptr(), len(flat), n, k, scheme.columns or k, gated, wide),
            *(level(), torch.get_num_threads()),
        )
    return out
