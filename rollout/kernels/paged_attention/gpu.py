"""Triton ``paged_attention``: one kernel for prefill, chunks and decode, and one that adds splits.

A program takes one KV head and a tile of rows, a row being a query with one of the query heads that
share the KV head, and runs over the keys with a running softmax (FlashAttention-2). Few rows, as
in decode, leave the device idle: then the keys of a row are split among programs, and
a second kernel adds their results up. How many splits depends on the shapes alone, never on values
on the device, so that a captured graph stays valid as contexts grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_kv_codes import as_integers, from_codes
from rollout.kernels.gpu_launch import (
    FLOATS,
    await_kernel_before,
    few_tokens,
    launch,
    multiply,
    narrow,
    power_of_2,
    sequence_of,
)
from rollout.kernels.gpu_support import multiprocessors
from rollout.kernels.kv_codes import are_pages, kind_of
from rollout.kernels.paged_attention import WIDE, has_few_queries, has_gpu_kernel
from rollout.kernels.paged_attention import paged_attention as op

_MAX_SPLITS = 32
_WIDE_GROUP = 16  # of heads wider than WIDE so many are attended to at once
_WAVES = 2  # programs per multiprocessor that splitting aims at
_LOG2_E = 1.4426950408889634
_TO_LOG2 = tl.constexpr(_LOG2_E)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the work is cut: ``rows`` of a tile (queries x heads), of which ``queries`` queries."""

    rows: int
    queries: int
    keys: int
    splits: int
    warps: int
    stages: int


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    arguments = (q, k_cache, v_cache, query_starts, context_lens, block_tables)
    scales = k_scales, v_scales
    if not takes(q, k_cache, v_cache, *scales):
        return op.reference(*arguments, scale, window, softcap, sinks, *scales)
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    group, decodes = heads // kv_heads, has_few_queries(tokens, len(context_lens))
    if dim > WIDE and group > _WIDE_GROUP:
        parts = []
        for first in range(0, heads, _WIDE_GROUP):
            of = slice(first, first + _WIDE_GROUP)
            some = (q[:, of], *arguments[1:], scale, window, softcap)
            parts.append(paged_attention(*some, None if sinks is None else sinks[of], *scales))
        return torch.cat(parts, dim=1)
    if not decodes:
        tiles = _prefill_tiles(group, dim, q.dtype)
        return attend(*arguments, scale, tiles, window, softcap, sinks, *scales)
    programs = max(1, tokens * kv_heads)
    longest = block_tables.shape[1] * k_cache.shape[2]
    longest = min(longest, window) if window else longest
    tiles = _decode_tiles(group, dim, q.dtype)
    wanted = triton.cdiv(_WAVES * multiprocessors(q.device), programs)
    splits = power_of_2(min(wanted, _MAX_SPLITS, triton.cdiv(longest, tiles.keys)))
    tiles = _decode_tiles(group, dim, q.dtype, splits)
    return attend(*arguments, scale, tiles, window, softcap, sinks, *scales)


def takes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> bool:
    alike = k_cache.dtype == v_cache.dtype and q.dtype in FLOATS
    pages = are_pages(q.dtype, k_cache, k_scales) and are_pages(q.dtype, v_cache, v_scales)
    return alike and pages and has_gpu_kernel(k_cache.shape[1], q.shape[2], q.dtype)


def batch_invariant_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """One size of tile for prefill and decode, keys never split."""
    arguments = (q, k_cache, v_cache, query_starts, context_lens, block_tables)
    scales = k_scales, v_scales
    if not takes(q, k_cache, v_cache, *scales) or q.shape[2] > WIDE:
        return op.reference(*arguments, scale, window, softcap, sinks, *scales)
    tiles = _prefill_tiles(q.shape[1] // k_cache.shape[1], q.shape[2], q.dtype)
    return attend(*arguments, scale, tiles, window, softcap, sinks, *scales)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    tiles: Tiles,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """``paged_attention`` cut into ``tiles``, for arguments that ``takes`` accepts."""
    tokens, heads, dim = q.shape
    _, kv_heads, block, _ = k_cache.shape
    sequences, splits = len(context_lens), tiles.splits
    assert k_cache.shape == v_cache.shape
    assert dim == k_cache.shape[3]
    assert heads % kv_heads == 0, f"{kv_heads} KV heads do not divide {heads} query heads"
    assert len(query_starts) == sequences + 1
    q = q if q.stride(2) == 1 else q.contiguous()
    block_tables = block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    parts, weights = out, out
    if splits > 1:
        parts = torch.empty((splits, tokens, heads, dim), dtype=torch.float32, device=q.device)
        weights = torch.empty((splits, tokens, heads), dtype=torch.float32, device=q.device)
    single = tiles.queries == 1
    count = tokens if single else tokens // tiles.queries + sequences if tokens else 0
    sunk = weights if sinks is None else sinks
    launch(
        _attend,
        (count, kv_heads, splits),
        *(q, as_integers(k_cache), as_integers(v_cache), parts, weights, sunk),
        *(weights if x is None else x for x in (k_scales, v_scales)),
        *(query_starts, context_lens, block_tables),
        *(scale * _LOG2_E, softcap * _LOG2_E, window),
        *(q.stride(0), q.stride(1), block_tables.stride(0), tokens, sequences),
        kv_heads,
        BLOCK=block,
        GROUP=heads // kv_heads,
        DIM=dim,
        BLOCK_D=max(16, power_of_2(dim)),
        ROWS=tiles.rows,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        SPLITS=splits,
        IEEE=q.dtype == torch.float32,
        WINDOW=window > 0,
        CAP=softcap > 0,
        SINKS=sinks is not None,
        KIND=kind_of(k_cache),
        warps=tiles.warps,
        stages=tiles.stages,
        overlap=few_tokens(tokens),
        # A tile of keys gives a row the same bits with a mask and without one.
        contract=False,
    )
    if splits > 1:
        size = power_of_2(dim)
        launch(
            _add,
            (tokens, heads),
            *(parts, weights, sunk, out, tokens),
            DIM=dim,
            BLOCK_D=size,
            N=splits,
            SINKS=sinks is not None,
            overlap=few_tokens(tokens),
        )
    return out


def _decode_tiles(group: int, dim: int, dtype: torch.dtype, splits: int = 1) -> Tiles:
    """One query per tile: its heads fill the rows, of which a matrix product wants 16."""
    keys = _keys(dim, dtype, 64)
    return Tiles(
        max(16, power_of_2(group)), 1, keys, splits, warps=4, stages=3 if dim <= 128 else 2
    )


def _prefill_tiles(group: int, dim: int, dtype: torch.dtype) -> Tiles:
    wide = dtype == torch.float32 or dim > 128
    rows = max(64 if wide else 128, power_of_2(group))
    if dim > 256:
        rows = max(16 if dim > WIDE else 32, power_of_2(group))
    # Compared on a card, heads of 128: 128 keys at a time were faster but for a few short prompts.
    keys = _keys(dim, dtype, 64) if wide else 128
    return Tiles(rows, rows // group, keys, 1, warps=8 if rows >= 128 else 4, stages=2)


def _keys(dim: int, dtype: torch.dtype, most: int) -> int:
    """Keys and values of a few stages have to fit the shared memory beside the queries."""
    size = max(16, power_of_2(dim)) * dtype.itemsize
    return max(16, min(most, (1 << 14) // size))


# Numbers of a batch are not compiled in: a kernel takes seconds, and every stream would wait.
@triton.jit(do_not_specialize=["table_row", "tokens", "sequences"])
def _attend(
    q,
    k_cache,
    v_cache,
    out,
    weights,
    sinks,
    k_scales,
    v_scales,
    query_starts,
    context_lens,
    block_tables,
    scale,
    cap,
    window,
    q_row,
    q_head,
    table_row,
    tokens,
    sequences,
    kv_heads,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    IEEE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    KIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_kernel_before(OVERLAP)
    tile, kv_head, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    if QUERIES > 1:  # what sees most keys begins first, so that none is left at the end
        tile = tl.num_programs(0) - 1 - tile
    sequence = sequence_of(tile, query_starts, sequences, QUERIES)
    start = tl.load(query_starts + sequence)
    stop = tl.load(query_starts + sequence + 1)
    context = tl.load(context_lens + sequence)
    if QUERIES == 1:
        first = tile
    else:
        first = start + (tile - (start // QUERIES + sequence)) * QUERIES
    if (first >= start) & (first < stop):
        row = tl.arange(0, ROWS)
        query = first + row // GROUP
        live = (row < QUERIES * GROUP) & (query < stop)
        head = kv_head * GROUP + row % GROUP
        position = context - stop + query  # of each row in its sequence
        last = tl.minimum(first + QUERIES, stop)
        end = context - stop + last  # keys that some row of the tile sees

        column = tl.arange(0, BLOCK_D)
        inside = column < DIM
        at = query.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + column[None, :]
        rows = tl.load(q + at, mask=live[:, None] & inside[None, :], other=0.0)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, BLOCK_D], tl.float32)
        begins = end * 0
        if WINDOW:  # whole tiles of keys, so that all rows add them up alike
            begins = tl.maximum(context - stop + first + 1 - window, 0) // KEYS * KEYS
        each = tl.cdiv(tl.cdiv(end - begins, KEYS), SPLITS) * KEYS
        low = begins + split * each
        high = tl.minimum(low + each, end)
        table = block_tables + sequence.to(tl.int64) * table_row
        oldest = context - stop + first - window  # before it may lie anything by now
        # Most keys are seen by all rows, and need no mask.
        middle = low
        if not WINDOW:
            middle = tl.maximum(low, tl.minimum(high, (context - stop + first + 1) // KEYS * KEYS))
        for begin in range(low, middle, KEYS):
            best, mass, total = _attend_to(
                *(begin, end, oldest, rows, position, best, mass, total, k_cache, v_cache),
                *(k_scales, v_scales, table, kv_heads, kv_head, column, inside, scale, cap),
                *(window, BLOCK, DIM, ROWS, KEYS, IEEE, False, WINDOW, CAP, KIND),
            )
        for begin in range(middle, high, KEYS):
            best, mass, total = _attend_to(
                *(begin, end, oldest, rows, position, best, mass, total, k_cache, v_cache),
                *(k_scales, v_scales, table, kv_heads, kv_head, column, inside, scale, cap),
                *(window, BLOCK, DIM, ROWS, KEYS, IEEE, True, WINDOW, CAP, KIND),
            )
        if SINKS and SPLITS == 1:
            sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * _TO_LOG2
            top = tl.maximum(best, sink)
            shrink = tl.exp2(best - top)
            mass = mass * shrink + tl.exp2(sink - top)
            total = total * shrink[:, None]
        whole = tl.where(mass == 0.0, 1.0, mass)  # a split may hold no key of a row
        total = total / whole[:, None]
        heads = kv_heads * GROUP
        flat = query.to(tl.int64) * heads + head
        mask = live[:, None] & inside[None, :]
        if SPLITS == 1:
            value = narrow(total, out.dtype.element_ty)
            tl.store(out + flat[:, None] * DIM + column[None, :], value, mask=mask)
        else:
            flat += split.to(tl.int64) * tokens * heads
            tl.store(out + flat[:, None] * DIM + column[None, :], total, mask=mask)
            tl.store(weights + flat, best + tl.log2(whole), mask=live)


@triton.jit
def _attend_to(
    begin,
    end,
    oldest,
    rows,
    position,
    best,
    mass,
    total,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    table,
    kv_heads,
    kv_head,
    column,
    inside,
    scale,
    cap,
    window,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IEEE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    KIND: tl.constexpr,
):
    """One tile of keys; not MASKED: every row sees all of them."""
    key = begin + tl.arange(0, KEYS)
    if MASKED:
        real = key < end
        if WINDOW:
            real = real & (key > oldest)
        page = tl.load(table + key // BLOCK, mask=real, other=0).to(tl.int64)
        both = real[:, None] & inside[None, :]
    else:
        page = tl.load(table + key // BLOCK).to(tl.int64)
        both = inside[None, :]
    place = (page * kv_heads + kv_head) * BLOCK + key % BLOCK
    there = (place * DIM)[:, None] + column[None, :]
    keys = from_codes(tl.load(k_cache + there, mask=both, other=0), rows.dtype, KIND)
    scores = tl.zeros([ROWS, KEYS], tl.float32)
    scores = multiply(rows, tl.trans(keys), scores, IEEE)
    if KIND > 0:
        if MASKED:
            k_scale = tl.load(k_scales + place, mask=real, other=0.0)
            v_scale = tl.load(v_scales + place, mask=real, other=0.0)
        else:
            k_scale, v_scale = tl.load(k_scales + place), tl.load(v_scales + place)
        scores = scores * k_scale[None, :]
    if CAP:
        scores = _bend(scores * scale, cap)
        scale = 1.0
    if MASKED:
        seen = key[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen & real[None, :], scores, float("-inf"))
    peak = tl.maximum(best, tl.max(scores, 1) * scale)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    shrink = tl.exp2(best - anchor)
    chances = tl.exp2(tl.fma(scores, tl.full([ROWS, KEYS], scale, tl.float32), -anchor[:, None]))
    mass = mass * shrink + tl.sum(chances, 1)
    values = tl.load(v_cache + there, mask=both, other=0)
    if KIND > 0:  # bfloat16 holds every code, and every size of a scale
        fine: tl.constexpr = tl.float32 if IEEE else tl.bfloat16
        chances = narrow(chances * v_scale[None, :], fine)
        values = from_codes(values, fine, KIND)
    else:
        chances = narrow(chances, v_cache.dtype.element_ty)
    total = multiply(chances, values, total * shrink[:, None], IEEE)
    return peak, mass, total


@triton.jit
def _bend(scores, cap):
    """``cap * tanh(scores / cap)``; both in units of log 2."""
    size = tl.abs(scores / cap)
    power = tl.exp(-2.0 * size)
    bent = (1.0 - power) / (1.0 + power) * cap
    return tl.where(scores < 0.0, -bent, bent)


@triton.jit(do_not_specialize=["tokens"])
def _add(
    parts,
    weights,
    sinks,
    out,
    tokens,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    N: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum of the splits' results, each by the mass of its keys."""
    await_kernel_before(OVERLAP)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    split, column = tl.arange(0, N), tl.arange(0, BLOCK_D)
    flat = (split.to(tl.int64) * tokens + token) * heads + head
    logs = tl.load(weights + flat)
    top = tl.max(logs, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * _TO_LOG2
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(logs - top)
    mass = tl.sum(weight, 0)
    if SINKS:
        mass += tl.exp2(sink - top)
    weight = weight / tl.maximum(mass, 1e-30)  # without any key, zeros
    at = flat[:, None] * DIM + column[None, :]
    values = tl.load(parts + at, mask=(column < DIM)[None, :], other=0.0)
    # A split without a key has weight 0, and wrote zeros.
    total = tl.sum(values * weight[:, None], 0)
    target = out + (token * heads + head) * DIM + column
    tl.store(target, narrow(total, out.dtype.element_ty), mask=column < DIM)
