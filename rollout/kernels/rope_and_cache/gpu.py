"""Triton ``rope_and_cache``: queries turn into a dense tensor, keys and values into their pages."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import (
    FLOATS,
    await_kernel_before,
    few_tokens,
    launch,
    narrow,
    power_of_2,
    rounded,
)
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
) -> Tensor:
    values, v_pages = (k, k_cache) if v is None or v_cache is None else (v, v_cache)
    if not is_for_kernel(FLOATS, q, k, values, cos, sin, k_cache, v_pages, slots):
        return op.reference(q, k, v, cos, sin, k_cache, v_cache, slots)
    return turn(q, k, None if v is None else values, cos, sin, k_cache, v_pages, slots)


def turn(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
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
        *(q, k, values, cos, sin, out, k_cache, v_cache, slots, block),
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
    OVERLAP: tl.constexpr,
):
    await_kernel_before(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos += token * 2 * HALF
    sin += token * 2 * HALF
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        to = q_out + token * heads * DIM
        x = q + token * q_token
        _rotate(
            *(x, q_head, to, DIM, head, heads, cos, sin, q_weight, eps, offset),
            *(DIM, HALF, HALF_BLOCK, REST_BLOCK, WIDE, NORM, NORM_WIDE),
        )
    else:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        x = k + token * k_token
        slot = tl.load(slots + token)
        # A padded token has no slot: all of its heads are masked.
        count = tl.where(slot >= 0, kv_heads, 0)
        stride = page * DIM
        start = (slot // page * kv_heads * page + slot % page) * DIM
        to = k_out + start
        _rotate(
            *(x, k_head, to, stride, head, count, cos, sin, k_weight, eps, offset),
            *(DIM, HALF, HALF_BLOCK, REST_BLOCK, WIDE, NORM, NORM_WIDE),
        )
        if VALUES:
            column = tl.arange(0, DIM_BLOCK)
            live = (head < count)[:, None] & (column < DIM)[None, :]
            at = head.to(tl.int64)[:, None]
            value = tl.load(v + token * v_token + at * v_head + column[None, :], mask=live)
            tl.store(v_out + start + at * stride + column[None, :], value, mask=live)


@triton.jit
def _rotate(
    x,
    x_head,
    out,
    out_head,
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
):
    """Some heads of one token; products and sum are rounded to the narrower dtype unless WIDE."""
    dtype = out.dtype.element_ty
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
    tl.store(target, narrow(low, dtype), mask=live)
    tl.store(target + HALF, narrow(high, dtype), mask=live)
    if REST_BLOCK > 0:
        target = out + head.to(tl.int64)[:, None] * out_head + 2 * HALF + rest[None, :]
        tl.store(target, narrow(last, dtype), mask=beyond)


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
