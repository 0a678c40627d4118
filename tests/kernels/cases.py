"""Inputs for every op: ordinary shapes, and the odd ones that break kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollout.kernels import scan_logits
from rollout.kernels.kv_codes import LARGEST, to_codes
from rollout.weights import PLAIN, Box, Layout, TileLayout
from rollout.weights.quantization import SCHEMES, Scheme

# Attention whose loops are long or many: seconds each under Triton's interpreter.
BROAD = ("one KV head for 64", "one KV head for 70", "long context")
# Those of which pages hold codes, too.
CODED = (
    "decodes",
    "mixed",
    "head dim 7",
    "head dim 80",
    "head dim 320",
    "latents of 576",
    "block 5",
    "window over spans",
    "all three",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """``make(dtype)`` gives an op's arguments; ``writes`` are the indices it changes in place.

    ``returns``: what it returns is looked at as well as what it writes. ``broad``: takes seconds
    under Triton's interpreter, and runs in `make more`.
    """

    op: str
    name: str
    make: Callable[[torch.dtype], tuple[Any, ...]]
    writes: tuple[int, ...] = field(default=())
    returns: bool = False
    broad: bool = False

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


def all_cases() -> Iterator[Case]:
    yield from _norms()
    yield from _rotaries()
    yield from _gates()
    yield from _attentions()
    yield from _selections()
    yield from _linears()
    yield from _adapters()
    yield from _quantizations()
    yield from _quantized_linears()
    yield from _scans()
    yield from _filters()
    yield from _experts()
    yield from _deltas()
    yield from _exchanges()
    yield from _draws()


def attention(
    sequences: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    block: int = 32,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    codes: torch.dtype | None = None,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Arguments of ``paged_attention`` for (query tokens, context) pairs; blocks are shuffled.
    ``codes``: what the pages hold, if not ``dtype``.
    """
    rng = torch.Generator().manual_seed(seed)
    needed = [-(-context // block) for _, context in sequences]
    blocks = sum(needed) + 3
    order = torch.randperm(blocks, generator=rng)
    tables = torch.zeros((len(sequences), max(needed, default=0) + 1), dtype=torch.int32)
    used = 0
    for row, count in zip(tables, needed, strict=True):
        row[:count] = order[used : used + count]
        used += count
    starts = torch.tensor([0, *(n for n, _ in sequences)]).cumsum(0).int()
    lengths = torch.tensor([context for _, context in sequences], dtype=torch.int32)
    k, v = (torch.randn(blocks, kv_heads, block, dim, generator=rng).to(dtype) for _ in "kv")
    q = torch.randn(int(starts[-1]), heads, dim, generator=rng).to(dtype)
    arguments = q, k, v, starts, lengths, tables, scale or dim**-0.5
    if not (window or softcap or sinks or codes):
        return arguments
    rest = window, softcap, _randn(heads, seed=6) * 3 if sinks else None
    if codes is None:
        return *arguments, *rest
    (k, k_scales), (v, v_scales) = to_codes(k, codes), to_codes(v, codes)
    return q, k, v, *arguments[3:], *rest, k_scales, v_scales


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _norms() -> Iterator[Case]:
    for shape in ((3, 64), (0, 64), (1, 1), (2, 5, 77), (4, 896), (7,), (300, 896)):
        weight = _randn(shape[-1], seed=1)
        x, residual = _randn(*shape), _randn(*shape, seed=2)
        yield Case("rms_norm", f"{shape}", lambda t, x=x, w=weight: (x.to(t), w.to(t), 1e-6))
        yield Case(
            "add_rms_norm",
            f"{shape}",
            lambda t, x=x, r=residual, w=weight: (x.to(t), r.to(t), w.to(t), 1e-5),
        )
    wide = _randn(5, 12, 48)
    yield Case("rms_norm", "slice of heads", lambda t: (wide.to(t)[:, 2:9], _randn(48).to(t), 1e-6))
    for offset in (0.0, 1.0):
        heads = lambda t, o=offset: (wide.to(t)[:, 2:9], _randn(48).to(t), 1e-6, o)  # noqa: E731
        yield Case("rms_norm", f"slice of heads, weights from {offset}", heads)
        added = lambda t, o=offset: (wide.to(t), wide.to(t) + 1, _randn(48).to(t), 1e-6, o)  # noqa: E731
        yield Case("add_rms_norm", f"weights from {offset}", added)
    yield Case("rms_norm", "transposed", lambda t: (wide.to(t).mT, _randn(12).to(t), 1e-6))
    yield Case("rms_norm", "zeros", lambda t: (torch.zeros(3, 20, dtype=t), _randn(20).to(t), 1e-6))
    yield Case(
        "add_rms_norm",
        "transposed",
        lambda t: (wide.to(t).mT, wide.to(t).mT, _randn(12).to(t), 1e-6),
    )


def _rotaries() -> Iterator[Case]:
    sizes = ((5, 4, 2, 64, 64), (1, 14, 2, 64, 64), (0, 4, 2, 64, 64), (3, 3, 1, 80, 20))
    for tokens, heads, kv_heads, dim, width in (*sizes, (9, 2, 2, 24, 24), (2, 2, 1, 7, 2)):
        angles = _randn(tokens, width // 2).repeat(1, 2) * 10
        for wide in (False, True):

            def make(
                t: torch.dtype,
                sizes: tuple[int, int, int, int] = (tokens, heads, kv_heads, dim),
                angles: Tensor = angles,
                wide: bool = wide,
            ) -> tuple[Any, ...]:
                tokens, heads, kv_heads, dim = sizes
                fused = _randn(tokens, heads + kv_heads, dim).to(t)
                table = torch.float32 if wide else t
                q, k = fused.split((heads, kv_heads), dim=1)
                v = _randn(tokens, 2 * kv_heads, dim, seed=4).to(t)[:, kv_heads:]
                cos, sin = angles.cos().to(table), angles.sin().to(table)
                cache = torch.zeros(6, kv_heads, 3, dim, dtype=t)
                slots = torch.randperm(18, generator=torch.Generator().manual_seed(1))[:tokens]
                return q, k, v, cos, sin, cache, cache.clone(), slots

            name = f"{tokens, heads, kv_heads, dim, width}-{'wide' if wide else 'same'}"
            yield Case("rope_and_cache", name, make, writes=(5, 6), returns=True)

            def latent(t: torch.dtype, make: Any = make) -> tuple[Any, ...]:
                q, k, _, cos, sin, cache, _, slots = make(t)
                return q, k, None, cos, sin, cache, None, slots

            if not wide:
                yield Case(
                    "rope_and_cache", f"{name}, keys alone", latent, writes=(5,), returns=True
                )

            def normed(
                t: torch.dtype, make: Any = make, dim: int = dim, offset: float | None = None
            ) -> tuple[Any, ...]:
                q, k, v, *rest = make(t)
                weights = (1 + _randn(dim, seed=s).to(t) / 4 for s in (5, 6))
                return q, k, v, *weights, 1e-6, offset, *rest

            options = {"writes": (9, 10), "returns": True}
            yield Case("norm_rope_and_cache", name, normed, **options)
            if not wide:
                plus = partial(normed, offset=1.0)
                yield Case("norm_rope_and_cache", f"{name}, weights from 1", plus, **options)


def _gates() -> Iterator[Case]:
    for shape in ((1, 2), (0, 8), (3, 62), (8, 2 * 4864), (2, 3, 30), (40, 256)):
        yield Case("silu_mul", f"{shape}", lambda t, s=shape: ((_randn(*s) * 8).to(t),))
    yield Case("silu_mul", "rows of a wider one", lambda t: (_randn(4, 64).to(t)[:, 3:41],))
    yield Case("silu_mul", "large", lambda t: (torch.linspace(-200, 200, 400)[None].to(t),))


def _attentions() -> Iterator[Case]:
    batches: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
        "no sequences": ([], {}),
        "one token": ([(1, 1)], {}),
        "decodes": ([(1, 1), (1, 31), (1, 32), (1, 33), (1, 257)], {"heads": 14}),
        "mixed": ([(40, 40), (1, 70), (9, 100), (1, 3), (130, 130)], {}),
        "sequence without rows": ([(1, 5), (0, 9), (3, 9)], {}),
        "no rows at all": ([(0, 9)], {}),
        "head dim 24": ([(1, 50), (17, 60)], {"dim": 24}),
        "head dim 80": ([(1, 50), (70, 90)], {"dim": 80, "heads": 8}),
        "head dim 7": ([(1, 70), (5, 65)], {"dim": 7, "heads": 3, "kv_heads": 1}),
        "head dim 128": ([(1, 70), (33, 65)], {"dim": 128}),
        "head dim 256": ([(1, 70), (33, 65)], {"dim": 256, "heads": 2}),
        "head dim 320": ([(1, 10), (3, 6)], {"dim": 320, "heads": 2}),
        "latents of 576": ([(1, 40), (5, 33)], {"heads": 20, "kv_heads": 1, "dim": 576}),
        "block 1": ([(1, 20), (5, 6)], {"block": 1}),
        "block 5": ([(1, 133), (64, 70)], {"block": 5}),
        "block 256": ([(1, 133), (64, 300)], {"block": 256}),
        "no grouping": ([(3, 90), (1, 65)], {"heads": 5, "kv_heads": 5}),
        "one KV head for 64": ([(3, 90), (1, 65)], {"heads": 64, "kv_heads": 1, "dim": 16}),
        "one KV head for 70": ([(3, 90), (1, 65)], {"heads": 70, "kv_heads": 1, "dim": 16}),
        "long context": ([(1, 5000), (65, 4096)], {"heads": 2, "kv_heads": 1}),
        "a tile that spans of keys divide": ([(70, 1060)], {"heads": 2, "kv_heads": 1}),
        "window": ([(40, 40), (1, 70), (9, 100), (1, 3), (130, 300)], {"window": 33}),
        "window of one": ([(3, 40), (1, 9)], {"window": 1}),
        "window over spans": ([(1, 3000), (2, 1300)], {"window": 1030, "heads": 2, "dim": 16}),
        "softcap": ([(40, 40), (1, 70), (9, 100)], {"softcap": 1.5, "scale": 0.5}),
        "sinks": ([(40, 40), (1, 70), (1, 1200)], {"sinks": True}),
        "all three": (
            [(1, 1500), (70, 140)],
            {"window": 40, "softcap": 2.0, "sinks": True, "heads": 6, "dim": 24},
        ),
        "steep": ([(1, 300), (90, 300)], {"scale": 2.0}),
    }
    for name, (sequences, shape) in batches.items():

        def make(t: torch.dtype, s: Any = sequences, shape: Any = shape) -> tuple[Any, ...]:
            return attention(s, dtype=t, **shape)

        yield Case("paged_attention", name, make, broad=name in BROAD)
        for codes in LARGEST if name in CODED else ():
            coded = partial(make, shape={**shape, "codes": codes})
            yield Case("paged_attention", f"{name}, {codes}", coded)
            if name == "mixed":
                yield Case("batch_invariant_attention", f"{name}, {codes}", coded)
        if name in ("decodes", "mixed", "head dim 24", "all three"):
            yield Case("batch_invariant_attention", name, make)

    def rising(t: torch.dtype) -> tuple[Any, ...]:
        """Scores that rise by more than an exponential holds, thousands of keys later."""
        q, k, *rest = attention([(1, 3100), (70, 3100)], heads=2, kv_heads=1, dim=16, dtype=t)
        _, _, _, tables, _ = rest
        for row, position, size in ((0, 1500, 30), (0, 2500, 200), (1, 1500, 30), (1, 3050, 200)):
            k[tables[row, position // 32], 0, position % 32] = size
        return q.abs(), k, *rest

    yield Case("paged_attention", "rising scores", rising, broad=True)

    def strided(t: torch.dtype) -> tuple[Any, ...]:
        q, *rest = attention([(3, 40), (1, 9)], dtype=t)
        fused = torch.cat((q, q, q), dim=1)
        return fused[:, q.shape[1] : 2 * q.shape[1]], *rest

    yield Case("paged_attention", "queries inside a fused projection", strided)


def _selections() -> Iterator[Case]:
    batches: dict[str, tuple[list[tuple[int, int]], int, dict[str, Any]]] = {
        "no rows": ([(0, 9)], 3, {}),
        "decodes": ([(1, 1), (1, 31), (1, 33), (0, 5), (1, 150)], 20, {"heads": 12, "dim": 18}),
        "mixed, one token each": ([(9, 40), (1, 70), (5, 5)], 1, {"block": 5, "dim": 7}),
        "fewer than are wanted": ([(3, 9), (1, 20)], 500, {"heads": 17, "dim": 33}),
        "many of equal score": ([(4, 60)], 9, {"heads": 1, "dim": 2}),
    }
    for name, (sequences, count, shape) in batches.items():

        def make(t: torch.dtype, s: Any = sequences, c: int = count, of: Any = shape) -> Any:
            q, keys, _, *places, _ = attention(s, kv_heads=1, dtype=t, **of)
            return q, _randn(*q.shape[:2], seed=8), keys, *places, c

        yield Case("select_tokens", name, make)


def packed_linear(
    rows: int, shape: tuple[int, int], *, bias: bool, dtype: torch.dtype, columns_before: int = 0
) -> tuple[Any, ...]:
    """Arguments of ``linear`` with weights in tiles; x may be columns of a wider tensor."""
    layout, inputs = TileLayout(16), shape[1]
    storage = torch.zeros(layout.storage_shape(shape), dtype=dtype)
    weight = (_randn(*shape) / inputs**0.5).to(dtype)
    layout.write(storage, shape, Box.full(shape), weight)
    x = _randn(rows, columns_before + inputs, seed=1).to(dtype)[:, columns_before:]
    return x, storage, _randn(shape[0], seed=2).to(dtype) if bias else None, layout, shape


def _quantizations() -> Iterator[Case]:
    for scheme in SCHEMES.values():
        for rows, columns in ((1, 32), (130, 160), (40, 37), (0, 64)):

            def make(
                t: torch.dtype, scheme: Scheme = scheme, size: tuple[int, int] = (rows, columns)
            ) -> tuple[Any, ...]:
                values = _randn(size[0], 2 * size[1]).to(t)[:, : size[1]]
                values[3:5] = 0
                return values, scheme

            if scheme.name != "mxfp4" or columns % 32 == 0:
                yield Case("quantize", f"{scheme.name}-{rows}-{columns}", make)


def _quantized_linears() -> Iterator[Case]:
    sizes = ((1, 32, 64), (5, 48, 96), (0, 32, 32), (6, 96, 160), (29, 64, 132), (101, 160, 36))
    for scheme in SCHEMES.values():
        for rows, outputs, inputs in sizes:
            for bias in (False, True):
                inputs = inputs // 32 * 32 if scheme.name == "mxfp4" else inputs

                def make(
                    t: torch.dtype,
                    size: tuple[int, int, int] = (rows, outputs, inputs),
                    bias: bool = bias,
                    scheme: Scheme = scheme,
                ) -> tuple[Any, ...]:
                    rows, *shape = size
                    codes, scales = scheme.quantize(_randn(*shape) / 8)
                    layout: Layout = PLAIN
                    if scheme.name != "mxfp4" and not bias:
                        plain, layout = codes, TileLayout(inputs=4)
                        codes = torch.empty(layout.storage_shape(shape), dtype=plain.dtype)
                        layout.write(codes, shape, Box.full(tuple(shape)), plain)
                    x = _randn(rows, 2, shape[1], seed=1)[:, 0].to(t)
                    b = _randn(shape[0], seed=2).to(t) if bias else None
                    return x, codes, scales, b, layout, tuple(shape), scheme, shape[0] % 32 == 0

                name = f"{scheme.name}-{rows, outputs, inputs}-{bias}"
                yield Case("quantized_linear", name, make)


def _linears() -> Iterator[Case]:
    for batch in ((3,), (0,), (2, 5), ()):
        for bias in (False, True):
            for layout in (PLAIN, TileLayout(16)):

                def make(
                    t: torch.dtype, batch: Any = batch, bias: bool = bias, layout: Any = layout
                ) -> tuple[Any, ...]:
                    shape = (48, 10)
                    storage = torch.zeros(layout.storage_shape(shape), dtype=t)
                    layout.write(storage, shape, Box.full(shape), _randn(*shape).to(t))
                    x = _randn(*batch, 10, seed=1).to(t)
                    return x, storage, _randn(48, seed=2).to(t) if bias else None, layout, shape

                yield Case("linear", f"{layout.name}-{batch}-{bias}", make)
                yield Case("batch_invariant_linear", f"{layout.name}-{batch}-{bias}", make)
                yield Case("gated_linear", f"{layout.name}-{batch}-{bias}", make)
    sizes = ((1, 16, 2), (5, 16, 30), (16, 64, 32), (17, 112, 34), (33, 96, 96), (101, 144, 66))
    for rows, outputs, inputs in sizes:
        for bias, before in ((False, 0), (True, 3)):

            def packed(
                t: torch.dtype,
                size: tuple[int, int, int] = (rows, outputs, inputs),
                bias: bool = bias,
                before: int = before,
            ) -> tuple[Any, ...]:
                return packed_linear(size[0], size[1:], bias=bias, dtype=t, columns_before=before)

            name = f"tiles-{rows, outputs, inputs}-{bias}-from {before}"
            yield Case("linear", name, packed)
            yield Case("gated_linear", name, packed)

    for rows in (1, 2):
        for outputs, inputs, bias in ((24, 192, True), (70, 2112, False)):

            def few(
                t: torch.dtype,
                size: tuple[int, int, int] = (rows, outputs, inputs),
                bias: bool = bias,
            ) -> tuple[Any, ...]:
                rows, *shape = size
                weight, x = (_randn(*shape) / 64).to(t), _randn(rows, shape[1] + 3, seed=1).to(t)
                held = _randn(shape[0], seed=2).to(t) if bias else None
                return x[:, : shape[1]], weight, held, PLAIN, tuple(shape)

            yield Case("linear", f"few-{rows, outputs, inputs}", few)
            yield Case("gated_linear", f"few-{rows, outputs, inputs}", few)


def _scans() -> Iterator[Case]:
    for rows, vocab in ((1, 1), (3, 511), (2, 512), (4, 1300), (0, 40), (5, 7000)):
        for warm in (False, True):

            def make(
                t: torch.dtype, rows: int = rows, vocab: int = vocab, warm: bool = warm
            ) -> tuple[Any, ...]:
                temperature = _randn(rows, seed=1).abs() + 0.3 if warm else None
                return (_randn(rows, vocab + 3) * 4).to(t)[:, :vocab], temperature

            yield Case("scan_logits", f"{rows, vocab}-{'warm' if warm else 'plain'}", make)


def filtered(
    logits: Tensor, top_k: float, top_p: float, min_p: float, temperature: float | None = None
) -> tuple[Any, ...]:
    """Arguments of ``filter_logits`` with the same settings for every row."""
    rows = len(logits)
    scale = None if temperature is None else torch.full((rows,), temperature)
    best, _, sums, mass = scan_logits.reference(logits, scale)
    settings = (
        torch.full((rows,), int(top_k)),
        torch.full((rows,), float(top_p), dtype=torch.float64),
        torch.full((rows,), float(min_p)),
    )
    return logits, scale, best, sums, mass, *settings


FILTERS = ((0, 1, 0), (5, 1, 0), (0, 0.7, 0), (0, 1, 0.02), (40, 0.9, 0.001), (1, 0.5, 1))


def _filters() -> Iterator[Case]:
    for rows, vocab in ((1, 1), (3, 511), (2, 512), (4, 1300), (0, 40), (5, 7000)):
        for settings in FILTERS:
            for temperature in (None, 0.6):

                def make(
                    t: torch.dtype,
                    size: tuple[int, int] = (rows, vocab),
                    settings: Any = settings,
                    temperature: Any = temperature,
                ) -> tuple[Any, ...]:
                    logits = (_randn(size[0], size[1] + 3) * 4).to(t)[:, : size[1]]
                    return filtered(logits, *settings, temperature)

                name = f"{rows, vocab}-{settings}-{'warm' if temperature else 'plain'}"
                yield Case("filter_logits", name, make)


def _experts() -> Iterator[Case]:
    """(tokens, experts kept here, the first of them, all experts, chosen, hidden, inner)."""
    sizes = ((1, 4, 0, 4, 2, 16, 8), (31, 7, 0, 7, 3, 32, 24))
    for size in (*sizes, (9, 2, 3, 8, 2, 16, 6), (5, 1, 0, 8, 1, 10, 7)):

        def make(t: torch.dtype, size: tuple[int, ...] = size) -> tuple[Any, ...]:
            tokens, kept, first, experts, chosen, hidden, inner = size
            x = _randn(tokens, hidden).to(t)
            w13 = (_randn(kept, 2 * inner, hidden, seed=1) / hidden**0.5).to(t)
            w2 = (_randn(kept, hidden, inner, seed=2) / inner**0.5).to(t)
            weights, picks = _randn(tokens, experts, seed=3).softmax(-1).topk(chosen)
            return x, w13, w2, picks, weights.to(t), first

        yield Case("fused_experts", f"{size}", make)

        def biased(t: torch.dtype, make: Any = make) -> tuple[Any, ...]:
            x, w13, w2, *rest = make(t)
            b13, b2 = _randn(*w13.shape[:2], seed=4).to(t), _randn(*w2.shape[:2], seed=5).to(t)
            w13, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w13, w2))
            return x, w13, w2, *rest, b13, b2, (1.7, 0.6)

        yield Case("fused_experts", f"{size}, biased, clamped, transposed", biased)

        def squared(t: torch.dtype, make: Any = make) -> tuple[Any, ...]:
            x, w13, w2, *rest = make(t)
            return x, w13[:, : w2.shape[2]], w2, *rest, None, None, None, True

        yield Case("fused_experts", f"{size}, squared", squared)


def scanned(
    sequences: list[tuple[int, int]], seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots, starts and lengths of (new tokens, context) pairs, and how many tokens there are; of a
    context below 0 there is no slot.
    """
    count = len(sequences)
    slots = torch.randperm(count + 2, generator=torch.Generator().manual_seed(seed))[:count].int()
    starts = torch.tensor([0, *(n for n, _ in sequences)]).cumsum(0).int()
    lengths = torch.tensor([context for _, context in sequences], dtype=torch.int32)
    return slots.where(lengths > 0, -1), starts, lengths.abs(), starts[-1]


def delta(
    sequences: list[tuple[int, int]], key_heads: int, heads: int, key_dim: int, dim: int,
    dtype: torch.dtype, by_row: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of ``gated_delta_rule``; q, k and v are views of one tensor."""
    slots, starts, lengths, tokens = scanned(sequences)
    columns = 2 * key_heads * key_dim, heads * dim
    mixed = _randn(int(tokens), sum(columns) + 3).to(dtype)
    keys = mixed[:, : columns[0]].unflatten(1, (2, key_heads, key_dim))
    v = mixed[:, columns[0] : sum(columns)].unflatten(1, (heads, dim))
    rows = (key_dim,) if by_row else ()
    gates = -_randn(int(tokens), heads, *rows, seed=1).exp() / 2
    betas = _randn(int(tokens), heads, seed=2).sigmoid()
    states = _randn(len(sequences) + 2, heads, key_dim, dim, seed=3)
    return keys[:, 0], keys[:, 1], v, gates, betas, states, slots, starts, lengths


def ssd(
    sequences: list[tuple[int, int]], groups: int, heads: int, size: int, dim: int,
    dtype: torch.dtype,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of ``ssd_scan``; x, b and c are views of one tensor."""
    slots, starts, lengths, tokens = scanned(sequences)
    widths = heads * dim, groups * size, groups * size
    scales = torch.ones(sum(widths))
    scales[widths[0] :] = size**-0.5  # what is read is a sum over them
    x, b, c = (_randn(int(tokens), sum(widths)) * scales).to(dtype).split(widths, dim=1)
    keys = [of.unflatten(1, (groups, size)) for of in (b, c)]
    steps, rates = _randn(int(tokens), heads, seed=1).exp() / 4, -_randn(heads, seed=2).exp()
    states = _randn(len(sequences) + 2, heads, size, dim, seed=3)
    parts = (steps, rates, _randn(heads, seed=4), states, slots, starts, lengths)
    return x.unflatten(1, (heads, dim)), *keys, *parts


def _deltas() -> Iterator[Case]:
    mixes = {
        "chunks and decodes": [(5, 5), (1, 9), (7, 30), (1, 1)],
        "one token": [(1, 40)],
        "padding": [(1, 9), (1, -1), (2, -9), (1, 40), (0, -1)],
        "nothing": [],
    }
    for name, sequences in mixes.items():
        for channels, width in ((37, 4), (128, 2)):

            def conv(t: torch.dtype, s=sequences, c=channels, w=width) -> tuple[Any, ...]:
                slots, starts, lengths, tokens = scanned(s)
                x, states = _randn(int(tokens), c + 5), _randn(len(s) + 2, c, w - 1, seed=1)
                weight = _randn(c, w, seed=2)
                return x.to(t)[:, 2 : c + 2], weight.to(t), states.to(t), slots, starts, lengths

            def biased(t: torch.dtype, make: Any = conv, c: int = channels) -> tuple[Any, ...]:
                return *make(t), _randn(c, seed=5).to(t)

            yield Case("causal_conv", f"{name}, {channels}x{width}", conv, (2,), returns=True)
            yield Case("causal_conv", f"{name}, {channels}, biased", biased, (2,), returns=True)
        for shape in ((2, 4, 16, 16), (1, 3, 20, 37), (2, 2, 128, 128)):
            made = lambda t, s=sequences, h=shape: delta(s, *h, t)  # noqa: E731
            yield Case("gated_delta_rule", f"{name}, {shape}", made, (5,), returns=True)
        by_row = lambda t, s=sequences: delta(s, 1, 3, 20, 37, t, by_row=True)  # noqa: E731
        yield Case("gated_delta_rule", f"{name}, by row", by_row, (5,), returns=True)
        for shape in ((2, 4, 16, 16), (1, 3, 20, 37), (1, 2, 128, 64)):
            made = lambda t, s=sequences, h=shape: ssd(s, *h, t)  # noqa: E731
            yield Case("ssd_scan", f"{name}, {shape}", made, (6,), returns=True)


def lora(
    groups: list[int],
    *,
    parts: tuple[int, ...] = (37,),
    inputs: int = 70,
    rank: int = 5,
    slots: int = 4,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:
    """Arguments of ``lora_linear``: ``groups``: tokens of slots 3, 2, 1 ..., others have none;
    ``padding``: tiles of no rows, as captured steps have them.
    """
    count, bounds = sum(groups), [0]
    for size in parts:
        bounds.append(bounds[-1] + size)
    rows = torch.randperm(count + 2, generator=torch.Generator().manual_seed(1))[:count]
    tiles, at = [], 0
    for group, size in enumerate(groups):
        for start in range(at, at + size, 16):
            tiles.append((slots - 1 - group, start, min(start + 16, at + size)))
        at += size
    tiles += [(0, 0, 0)] * padding
    y = _randn(count + 2, bounds[-1] + 3).to(dtype)[:, : bounds[-1]]
    x = _randn(count + 2, inputs + 2, seed=1).to(dtype)[:, :inputs]
    a = _randn(slots, len(parts), rank, inputs, seed=2) / inputs**0.5
    b = _randn(slots, rank, bounds[-1], seed=3) / rank**0.5
    scales = torch.rand(slots, len(parts), generator=torch.Generator().manual_seed(4))
    scales[-1, 0] = 0
    where = rows.int(), torch.tensor(tiles, dtype=torch.int32).view(-1, 3)
    return y, x, a.to(dtype), b.to(dtype), scales, tuple(bounds), *where


def _adapters() -> Iterator[Case]:
    shapes: list[tuple[list[int], dict[str, Any]]] = [
        ([1], {}),
        ([2, 3, 1], {"parts": (33, 8, 15), "padding": 2}),
        ([], {}),
        ([17, 40], {"parts": (300, 16), "inputs": 129, "rank": 16}),
        ([4, 4, 4], {"parts": (64,), "inputs": 64, "rank": 8}),
    ]
    for groups, sizes in shapes:
        made = lambda t, g=groups, s=sizes: lora(g, dtype=t, **s)  # noqa: E731
        yield Case("lora_linear", f"{groups}, {sizes}", made, writes=(0,))


def _exchanges() -> Iterator[Case]:
    for shape in ((3,), (0, 4), (5, 7), (64, 33), (4100,)):

        def make(t: torch.dtype, shape: tuple[int, ...] = shape) -> tuple[Any, ...]:
            return _randn(*shape).to(t), _randn(*shape, seed=1).to(t)

        yield Case("swap_tensors", f"{shape}", make, writes=(0, 1))
    for shape in ((3, 6, 5), (1, 6, 2, 16), (2, 6), (0, 6, 3)):

        def copied(t: torch.dtype, shape: tuple[int, ...] = shape) -> tuple[Any, ...]:
            pairs = torch.tensor([[4, 1], [0, 5], [4, 2]])
            return _randn(*shape).to(t), pairs

        yield Case("copy_slots", f"{shape}", copied, writes=(0,))


def _draws() -> Iterator[Case]:
    """Settings of a row: temperature (0 greedy), top_p, min_p, top_k, given token."""
    settings = [
        (0.0, 1.0, 0.0, 0, -1),
        (1.0, 1.0, 0.0, 0, -1),
        (0.7, 1.0, 0.0, 0, -1),
        (1.0, 1.0, 0.0, 0, 3),
        (1.3, 0.8, 0.0, 0, -1),
        (1.0, 1.0, 0.1, 0, -1),
        (0.9, 1.0, 0.0, 5, -1),
        (1.1, 0.6, 0.05, 9, -1),
        (1.0, 0.0, 0.0, 0, -1),
        (1.0, 1.0, 0.0, 1, -1),
        (0.01, 0.9, 0.0, 0, -1),
        (0.01, 1.0, 0.0, 5, -1),
    ]
    for vocab, times in ((7, 1), (512, 1), (1300, 1), (9000, 1), (700, 3)):

        def make(t: torch.dtype, vocab: int = vocab, times: int = times) -> tuple[Any, ...]:
            rows = len(settings) * times
            logits = (_randn(rows, vocab + 3) * 4).to(t)[:, :vocab]
            table = torch.tensor(settings * times)
            draws = torch.rand(rows, generator=torch.Generator().manual_seed(5)).double()
            given, top_k = table[:, 4].long(), table[:, 3].long()
            return logits, given, table[:, :3].contiguous(), top_k, draws

        yield Case("sample", f"{vocab} x {times}", make, broad=vocab > 512)
    yield Case(
        "sample",
        "no rows",
        lambda t: (
            torch.zeros(0, 9, dtype=t),
            torch.zeros(0).long(),
            torch.zeros(0, 3),
            torch.zeros(0).long(),
            torch.zeros(0).double(),
        ),
    )
