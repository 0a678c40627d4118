"""Triton ``rope_and_cache``: queries turn into a dense tensor, keys and values into their pages."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_kv_codes import as_integers, scales_of, to_codes
from rollout.kernels.gpu_launch import (
    FLOATS,
    await_kernel_before,
    few_tokens,
    launch,
    narrow,
    power_of_2,
    rounded,
)
from rollout.kernels.kv_codes import kind_of
from rollout.kernels.rope_and_cache import is_for_kernel
from rollout.kernels.rope_and_cache import rope_and_cache as op

_HEADS = 4  # heads of one program


class HeadNorm(NamedTuple):
    """What ``rms_norm`` takes, of queries and of keys."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float | None


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slots: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    values, v_pages, others = (
        (k, k_cache, k_scales) if v is None or v_cache is None else (v, v_cache, v_scales)
    )
    if not is_for_kernel(FLOATS, q, k, values, cos, sin, k_cache, v_pages, slots, k_scales, others):
        return op.reference(q, k, v, cos, sin, k_cache, v_cache, slots, k_scales, v_scales)
    caches = k_cache, v_pages, slots, k_scales, others
    return turn(q, k, None if v is None else values, cos, sin, *caches)


def turn(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    norm: HeadNorm | None = None,
) -> Tensor:
    """``rope_and_cache``, for arguments that ``is_for_kernel`` accepts, of what ``norm`` gives."""
    tokens, heads, dim = q.shape
    _, kv_heads, block, _ = k_cache.shape
    q, k, values = (
        x if x.stride(2) == 1 else x.contiguous() for x in (q, k, k if v is None else v)
    )
    cos, sin, slots, half = *(x.contiguous() for x in (cos, sin, slots)), cos.shape[1] // 2
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q_blocks = triton.cdiv(heads, _HEADS)
    launch(
        _turn,
        (tokens, q_blocks + triton.cdiv(kv_heads, _HEADS)),
        *(q, k, values, cos, sin, out, as_integers(k_cache), as_integers(v_cache)),
        *(out if x is None else x for x in (k_scales, v_scales)),
        *(slots, block),
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), values.stride(0), values.stride(1)),
        *(heads, kv_heads, q_blocks),
        *((q, k, 0.0, 0.0) if norm is None else (*norm[:3], norm.offset or 0.0)),
        DIM=dim,
        HALF=half,
        HALF_BLOCK=power_of_2(half),
        REST_BLOCK=power_of_2(dim - 2 * half) if dim > 2 * half else 0,
        DIM_BLOCK=power_of_2(dim),
        HEADS=_HEADS,
        WIDE=cos.dtype == torch.float32,
        VALUES=v is not None,
        NORM=norm is not None,
        NORM_WIDE=norm is not None and norm.offset is not None,
        KIND=kind_of(k_cache),
        warps=2,
        overlap=few_tokens(tokens),
        contract=False,
    )
    return out


@triton.jit
def _turn(
    q,
    k,
    v,
    cos,
    sin,
    q_out,
    k_out,
    v_out,
    k_scales,
    v_scales,
    slots,
    page,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    heads,
    kv_heads,
    q_blocks,
    q_weight,
    k_weight,
    eps,
    offset,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    WIDE: tl.constexpr,
    VALUES: tl.constexpr,
    NORM: tl.constexpr,
    NORM_WIDE: tl.constexpr,
    KIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_kernel_before(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos += token * 2 * HALF
    sin += token * 2 * HALF
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        x = q + token * q_token
        _rotate(
            *(x, q_head, q_out + token * heads * DIM, DIM, k_scales, 0, head, heads, cos, sin),
            *(q_weight, eps, offset, DIM, HALF, HALF_BLOCK, REST_BLOCK, WIDE, NORM, NORM_WIDE, 0),
        )
    else:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        x = k + token * k_token
        slot = tl.load(slots + token)
        # A padded token has no slot: all of its heads are masked.
        count = tl.where(slot >= 0, kv_heads, 0)
        stride = page * DIM
        place = slot // page * kv_heads * page + slot % page
        start = place * DIM
        _rotate(
            *(x, k_head, k_out + start, stride, k_scales + place, page, head, count, cos, sin),
            *(k_weight, eps, offset, DIM, HALF, HALF_BLOCK, REST_BLOCK),
            *(WIDE, NORM, NORM_WIDE, KIND),
        )
        if VALUES:
            column = tl.arange(0, DIM_BLOCK)
            live = (head < count)[:, None] & (column < DIM)[None, :]
            at = head.to(tl.int64)[:, None]
            source = v + token * v_token + at * v_head + column[None, :]
            if KIND == 0:
                value = tl.load(source, mask=live)
            else:
                wide = tl.load(source, mask=live, other=0.0).to(tl.float32)
                most, bad = tl.max(tl.abs(wide), 1), tl.sum(wide - wide, 1)
                scale, by = scales_of(most, bad, KIND)
                tl.store(v_scales + place + head * page, scale, mask=head < count)
                value = to_codes(wide * by[:, None], KIND)
            tl.store(v_out + start + at * stride + column[None, :], value, mask=live)


@triton.jit
def _rotate(
    x,
    x_head,
    out,
    out_head,
    scales,
    scale_head,
    head,
    heads,
    cos,
    sin,
    weight,
    eps,
    offset,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    NORM: tl.constexpr,
    NORM_WIDE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Some heads of one token; products and sum are rounded to the narrower dtype unless WIDE."""
    dtype = x.dtype.element_ty
    column = tl.arange(0, HALF_BLOCK)
    within = column < HALF
    live = (head < heads)[:, None] & within[None, :]
    source = x + head.to(tl.int64)[:, None] * x_head + column[None, :]
    target = out + head.to(tl.int64)[:, None] * out_head + column[None, :]
    first = tl.load(source, mask=live, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if REST_BLOCK > 0:
        rest = tl.arange(0, REST_BLOCK)
        behind = rest < DIM - 2 * HALF
        beyond = (head < heads)[:, None] & behind[None, :]
        tail = x + head.to(tl.int64)[:, None] * x_head + 2 * HALF + rest[None, :]
        last = tl.load(tail, mask=beyond, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(last * last, 1)
    if NORM:
        scale = tl.rsqrt(squares / DIM + eps)
        first = _scaled(first, scale, weight + column, within, offset, dtype, NORM_WIDE)
        second = _scaled(second, scale, weight + HALF + column, within, offset, dtype, NORM_WIDE)
        if REST_BLOCK > 0:
            factors = weight + 2 * HALF + rest
            last = _scaled(last, scale, factors, behind, offset, dtype, NORM_WIDE)
    c = tl.load(cos + column, mask=within, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + column, mask=within, other=0.0).to(tl.float32)[None, :]
    if WIDE:
        low, high = first * c - second * s, second * c + first * s
    else:
        low = rounded(first * c, dtype) - rounded(second * s, dtype)
        high = rounded(second * c, dtype) + rounded(first * s, dtype)
    if KIND > 0:
        low, high = rounded(low, dtype), rounded(high, dtype)
        most = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        bad = tl.sum(low - low, 1) + tl.sum(high - high, 1)
        if REST_BLOCK > 0:
            most = tl.maximum(most, tl.max(tl.abs(last), 1))
            bad += tl.sum(last - last, 1)
        scale, by = scales_of(most, bad, KIND)
        tl.store(scales + head * scale_head, scale, mask=head < heads)
        low, high = to_codes(low * by[:, None], KIND), to_codes(high * by[:, None], KIND)
        if REST_BLOCK > 0:
            last = to_codes(last * by[:, None], KIND)
    else:
        low, high = narrow(low, dtype), narrow(high, dtype)
        if REST_BLOCK > 0:
            last = narrow(last, dtype)
    tl.store(target, low, mask=live)
    tl.store(target + HALF, high, mask=live)
    if REST_BLOCK > 0:
        target = out + head.to(tl.int64)[:, None] * out_head + 2 * HALF + rest[None, :]
        tl.store(target, last, mask=beyond)


@triton.jit
def _scaled(x, scale, weight, within, offset, dtype: tl.constexpr, WIDE: tl.constexpr):
    """As ``rms_norm``, some columns: rounded where it rounds."""
    factor = tl.load(weight, mask=within, other=0.0).to(tl.float32)
    x = x * scale[:, None]
    if WIDE:
        factor += offset
    else:
        x = rounded(x, dtype)
    return rounded(x * factor[None, :], dtype)
