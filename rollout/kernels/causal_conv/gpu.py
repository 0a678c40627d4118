"""Triton ``causal_conv``: some channels of some tokens of one sequence per program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty

from rollout.kernels.causal_conv import causal_conv as op
from rollout.kernels.gpu_launch import FLOATS, launch, narrow, power_of_2, rounded, silu

_CHANNELS = 256
_TOKENS = 64  # at least the width - 1: the first such part of a sequence alone reads its state
_MAX_WIDTH = 16


def causal_conv(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    (tokens, channels), width = x.shape, weight.shape[1]
    alike = x.dtype == weight.dtype == states.dtype and x.dtype in FLOATS
    if not (alike and weight.is_contiguous() and states.is_contiguous()) or width > _MAX_WIDTH:
        return op.reference(x, weight, states, slots, query_starts, context_lens, bias)
    assert weight.shape[0] == channels
    assert states.shape[1:] == (channels, width - 1)
    assert bias is None or (bias.shape, bias.dtype) == ((channels,), x.dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = empty((tokens, channels), dtype=x.dtype, device=x.device)
    block = min(_CHANNELS, power_of_2(channels))
    launch(
        _convolve,
        (len(slots), triton.cdiv(channels, block), triton.cdiv(tokens, _TOKENS)),
        *(x, weight, states, slots, query_starts, context_lens, out, x.stride(0), channels),
        weight if bias is None else bias.contiguous(),
        BIAS=bias is not None,
        WIDTH=width,
        BLOCK=block,
        TOKENS=_TOKENS,
    )
    return out


@triton.jit
def _convolve(
    x,
    weight,
    states,
    slots,
    starts,
    lengths,
    out,
    row,
    channels,
    bias,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    dtype = out.dtype.element_ty
    s, part = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Masks are made of blocks: "&" takes no scalar. Of a long prompt offsets pass 32 bits.
    live, each = c < channels, (c * 0).to(tl.int64)
    slot = tl.load(slots + s).to(tl.int64)
    first = tl.load(starts + s).to(tl.int64)
    tokens = (tl.load(starts + s + 1) - first).to(tl.int32)
    has_state = each + slot >= 0
    kept = has_state & (each + tl.load(lengths + s) > tokens)
    state = states + (slot * channels + c) * (WIDTH - 1)
    x += first * row + c
    out += first * channels + c
    for t in range(part * TOKENS, tl.minimum(tokens, (part + 1) * TOKENS)):
        total = tl.zeros((BLOCK,), tl.float32)
        if BIAS:
            total += tl.load(bias + c, mask=live, other=0.0).to(tl.float32)
        for j in tl.static_range(WIDTH):
            at = each + (t - (WIDTH - 1) + j)  # below 0: in the state
            new = tl.load(x + at * row, mask=live & (at >= 0), other=0.0).to(tl.float32)
            old = tl.load(state + t + j, mask=live & (at < 0) & kept, other=0.0).to(tl.float32)
            factor = tl.load(weight + c * WIDTH + j, mask=live, other=0.0).to(tl.float32)
            total += (new + old) * factor
        value = narrow(silu(rounded(total, dtype)), dtype)
        tl.store(out + (each + t) * channels, value, mask=live)
    if part == 0:
        tl.debug_barrier()
        for j in tl.static_range(WIDTH - 1):  # what it reads of the state lies behind what it wrote
            at = each + (tokens - (WIDTH - 1) + j)
            new = tl.load(x + at * row, mask=live & (at >= 0), other=0.0)
            old = tl.load(state + tokens + j, mask=live & (at < 0) & kept, other=0.0)
            tl.store(state + j, tl.where(at >= 0, new, old), mask=live & has_state)
