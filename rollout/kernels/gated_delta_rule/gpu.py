"""Triton ``gated_delta_rule``: some columns of one head's state of one sequence per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gated_delta_rule import EPS
from rollout.kernels.gated_delta_rule import gated_delta_rule as op
from rollout.kernels.gpu_launch import FLOATS, held_columns, launch, narrow, power_of_2
from rollout.kernels.op import in_rows


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    betas: Tensor,
    states: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
) -> Tensor:
    tokens, heads, dim = v.shape
    key_heads, key_dim = k.shape[1:]
    alike = q.dtype == k.dtype == v.dtype and v.dtype in FLOATS
    if not (alike and states.dtype == torch.float32 and states.is_contiguous()):
        return op.reference(q, k, v, gates, betas, states, slots, query_starts, context_lens)
    assert q.shape == k.shape == (tokens, key_heads, key_dim)
    assert states.shape[1:] == (heads, key_dim, dim)
    assert betas.shape == (tokens, heads)
    assert gates.shape in (betas.shape, (tokens, heads, key_dim))
    q, k, v = in_rows(q), in_rows(k), in_rows(v)
    gates, betas = gates.float().contiguous(), betas.float().contiguous()
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    rows = power_of_2(key_dim)
    columns = held_columns(rows, dim)
    launch(
        _scan,
        (len(slots), heads, triton.cdiv(dim, columns)),
        *(q, k, v, out, gates, betas, states, slots, query_starts, context_lens),
        *(q.stride(0), k.stride(0), v.stride(0), heads, heads // key_heads, key_dim, dim),
        *(key_dim**-0.5, EPS),
        ROWS=rows,
        COLUMNS=columns,
        BY_ROW=gates.dim() == 3,
    )
    return out


@triton.jit
def _scan(
    q,
    k,
    v,
    out,
    gates,
    betas,
    states,
    slots,
    starts,
    lengths,
    q_row,
    k_row,
    v_row,
    heads,
    each,
    key_dim,
    dim,
    scale,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    s, head = tl.program_id(0), tl.program_id(1)
    r, c = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    row, column = r < key_dim, c < dim
    first = tl.load(starts + s).to(tl.int64)
    stop = tl.load(starts + s + 1).to(tl.int64)
    own = tl.load(slots + s).to(tl.int64)
    has_state = r[:, None] * 0 + own >= 0
    kept = has_state & (r[:, None] * 0 + tl.load(lengths + s) > stop - first)
    slot = own * heads + head
    at = states + slot * key_dim * dim + r[:, None] * dim + c[None, :]
    live = row[:, None] & column[None, :]
    state = tl.load(at, mask=live & kept, other=0.0)
    key_at = head // each * key_dim + r
    for t in range(first, stop):
        key = tl.load(k + t * k_row + key_at, mask=row, other=0.0).to(tl.float32)
        query = tl.load(q + t * q_row + key_at, mask=row, other=0.0).to(tl.float32)
        key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
        query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * scale
        value = tl.load(v + t * v_row + head * dim + c, mask=column, other=0.0).to(tl.float32)
        if BY_ROW:
            decay = tl.load(gates + (t * heads + head) * key_dim + r, mask=row, other=0.0)
            state *= tl.exp(decay)[:, None]
        else:
            state *= tl.exp(tl.load(gates + t * heads + head))
        delta = value - tl.sum(state * key[:, None], 0)
        delta *= tl.load(betas + t * heads + head)
        state += key[:, None] * delta[None, :]
        read = tl.sum(state * query[:, None], 0)
        here = out + (t * heads + head) * dim + c
        tl.store(here, narrow(read, out.dtype.element_ty), mask=column)
    tl.store(at, state, mask=live & has_state)
