"""Native CPU kernels beside torch: median times, the two taken in turn.

python benchmarks/ops.py [--threads 1] [--rounds 15] [--quick] [--only linears]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout import kernels
from rollout.kernels.kv_codes import LARGEST, to_codes
from rollout.kernels.native import native_status, use_huge_pages
from rollout.weights import PLAIN, Box, TileLayout, WeightSlot

HEADS, KV_HEADS, DIM, BLOCK = 14, 2, 64, 32


def medians(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """Median seconds of each, called in turn after one warm-up."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 1):
        for run, kept in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if turn:
                kept.append(time.perf_counter() - start)
    return [statistics.median(kept) for kept in times]


def compare(
    name: str, rounds: int, native: Callable[[], object], rival: Callable[[], object]
) -> None:
    ours, theirs = medians(rounds, native, rival)
    print(
        f"{name:44} native {ours * 1e6:9.1f} us   torch {theirs * 1e6:9.1f} us   "
        f"torch/native {theirs / ours:5.2f}"
    )


def paged(batch: int, queries: int, context: int, dtype: torch.dtype) -> tuple[Any, ...]:
    pages = -(-context // BLOCK)
    tables = torch.randperm(batch * pages).view(batch, pages).int()
    k, v = (torch.randn(batch * pages, KV_HEADS, BLOCK, DIM).to(dtype) for _ in "kv")
    q = torch.randn(batch * queries, HEADS, DIM).to(dtype)
    starts = (torch.arange(batch + 1) * queries).int()
    lengths = torch.full((batch,), context, dtype=torch.int32)
    return q, k, v, starts, lengths, tables, DIM**-0.5


def sdpa(
    arguments: tuple[Any, ...], batch: int, queries: int, context: int
) -> Callable[[], Tensor]:
    """torch's SDPA for sequences of one length: a decode must gather its pages first."""
    q, k, v, _, _, tables, _ = arguments
    q, tables = q.view(batch, queries, HEADS, DIM).transpose(1, 2), tables.long()

    def gathered(cache: Tensor) -> Tensor:
        return cache[tables].transpose(1, 2).reshape(batch, KV_HEADS, -1, DIM)[:, :, :context]

    def attend(k: Tensor, v: Tensor) -> Tensor:
        causal = queries == context
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    if queries == 1:
        return lambda: attend(gathered(k), gathered(v))
    k, v = gathered(k).contiguous(), gathered(v).contiguous()
    return lambda: attend(k, v)


def attention(rounds: int, quick: bool) -> None:
    for batch in (1, 8, 32, 64):
        arguments = paged(batch, 1, 256, torch.bfloat16)
        compare(
            f"paged_attention decode B={batch} ctx=256 bf16",
            rounds,
            lambda a=arguments: kernels.paged_attention(*a),
            sdpa(arguments, batch, 1, 256),
        )
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (256, 512) if quick else (256, 512, 1024, 2048):
            arguments = paged(1, tokens, tokens, dtype)
            compare(
                f"paged_attention prefill T={tokens} {str(dtype)[6:]}",
                max(3, rounds // 3),
                lambda a=arguments: kernels.paged_attention(*a),
                sdpa(arguments, 1, tokens, tokens),
            )


def codes(rounds: int, quick: bool) -> None:
    """Attention over keys and values in 8 bits, beside bfloat16."""
    for batch, queries, context in ((32, 1, 256), (8, 1, 4096), (1, 1, 32768), (1, 512, 4096)):
        if quick and context > 4096:
            continue
        q, k, v, *rest = paged(batch, queries, context, torch.bfloat16)
        runs: list[Callable[[], object]] = [partial(kernels.paged_attention, q, k, v, *rest)]
        for kind in LARGEST:
            (k_codes, k_scales), (v_codes, v_scales) = to_codes(k, kind), to_codes(v, kind)
            scales = {"k_scales": k_scales, "v_scales": v_scales}
            runs.append(partial(kernels.paged_attention, q, k_codes, v_codes, *rest, **scales))
        plain, *others = medians(rounds, *runs)
        told = "   ".join(
            f"{str(kind)[6:]} {seconds * 1e6:9.1f} us, {plain / seconds:4.2f} x"
            for kind, seconds in zip(LARGEST, others, strict=True)
        )
        name = f"paged_attention {batch} x {queries} of {context}"
        print(f"{name:36} bfloat16 {plain * 1e6:9.1f} us   {told}")


def long_contexts(rounds: int, threads: int) -> None:
    """One sequence's decode with ``threads``, beside one thread."""
    for context in (4096, 32768):
        arguments = paged(1, 1, context, torch.bfloat16)
        one_head = [x[:, :1].contiguous() for x in arguments[1:3]]  # the KV of one head
        arguments = (arguments[0][:, : HEADS // KV_HEADS], *one_head, *arguments[3:])

        def run(count: int, arguments: tuple[Any, ...] = arguments) -> None:
            torch.set_num_threads(count)
            kernels.paged_attention(*arguments)

        shared, alone = medians(rounds, lambda: run(threads), lambda: run(1))
        print(
            f"paged_attention decode B=1 ctx={context} 1 KV head: {threads} threads "
            f"{shared * 1e6:9.1f} us   one {alone * 1e6:9.1f} us   ratio {alone / shared:5.2f}"
        )
    torch.set_num_threads(threads)


def small_ops(rounds: int) -> None:
    for batch in (1, 8, 32):
        x, residual = torch.randn(2, batch, 896).bfloat16()
        weight = torch.randn(896).bfloat16()
        q, k = torch.randn(batch, 16, 64).bfloat16().split((14, 2), dim=1)
        angles = torch.randn(batch, 32).repeat(1, 2)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        gate_up = torch.randn(batch, 2 * 4864).bfloat16()
        caches = torch.zeros(2, 64, 2, 32, 64).bfloat16()
        slots = torch.randperm(64 * 32)[:batch]
        calls = (
            (kernels.rms_norm, (x, weight, 1e-6)),
            (kernels.add_rms_norm, (x, residual, weight, 1e-6)),
            (kernels.silu_mul, (gate_up,)),
            (kernels.rope_and_cache, (q, k, k, cos, sin, caches[0], caches[1], slots)),
        )
        for op, arguments in calls:
            compare(
                f"{op.name} B={batch} bf16",
                rounds * 10,
                lambda op=op, a=arguments: op(*a),
                lambda op=op, a=arguments: op.reference(*a),
            )


def linears(rounds: int) -> None:
    """Weights in tiles against ``F.linear``; eight copies in turn defeat the caches."""
    layout = TileLayout()
    for shape in ((1152, 896), (896, 896), (9728, 896), (896, 4864), (11264, 2048), (2048, 5632)):
        plain = [torch.randn(shape).bfloat16() for _ in range(8)]
        tiles = []
        for weight in plain:
            storage = torch.empty(layout.storage_shape(shape), dtype=weight.dtype)
            use_huge_pages(storage)
            layout.write(storage, shape, Box.full(shape), weight)
            tiles.append(storage)
        for batch in (1, 8, 32, 64, 512, 2048):
            x = torch.randn(batch, shape[1]).bfloat16()
            turns = (cycle(tiles), cycle(plain))
            compare(
                f"linear {shape[0]}x{shape[1]} B={batch} bf16",
                rounds if batch < 512 else max(3, rounds // 4),
                lambda x=x, t=turns[0], s=shape: kernels.linear(x, next(t), None, layout, s),
                lambda x=x, t=turns[1]: F.linear(x, next(t)),
            )
            if shape[0] <= 4 * shape[1]:
                continue
            apart = cycle(tiles)
            compare(
                f"gated_linear {shape[0]}x{shape[1]} B={batch} against two native ops",
                rounds if batch < 512 else max(3, rounds // 4),
                lambda x=x, t=turns[0], s=shape: kernels.gated_linear(x, next(t), None, layout, s),
                lambda x=x, t=apart, s=shape: kernels.silu_mul(
                    kernels.linear(x, next(t), None, layout, s)
                ),
            )


def scans(rounds: int) -> None:
    for batch in (1, 8, 32, 64):
        logits = torch.randn(batch, 151936).bfloat16()
        compare(
            f"scan_logits B={batch} V=151936 bf16",
            rounds,
            lambda x=logits: kernels.scan_logits(x),
            lambda x=logits: kernels.scan_logits.reference(x),
        )


def filters(rounds: int) -> None:
    """Peaked and nearly flat rows; each filter alone and all of them."""
    for batch in (1, 8, 32):
        for scale in (3.0, 0.5):
            logits = (torch.randn(batch, 151936) * scale).bfloat16()
            best, _, sums, mass = kernels.scan_logits(logits)
            for name, k, p, low in (
                ("top_k=50", 50, 1.0, 0.0),
                ("top_p=0.95", 0, 0.95, 0.0),
                ("min_p=0.05", 0, 1.0, 0.05),
                ("all", 50, 0.95, 0.05),
            ):
                settings = (
                    torch.full((batch,), k),
                    torch.full((batch,), p, dtype=torch.float64),
                    torch.full((batch,), low),
                )
                arguments = (logits, None, best, sums, mass, *settings)
                compare(
                    f"filter_logits B={batch} {name} scale {scale}",
                    max(3, rounds // 3),
                    lambda a=arguments: kernels.filter_logits(*a),
                    lambda a=arguments: kernels.filter_logits.reference(*a),
                )


def digests(rounds: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        shape = (4096, 4096)
        values = (torch.randn(shape) * 0.02).to(dtype)  # as weights are
        half = Box((0, 1024), (4096, 3072))
        for name, box in (("whole", Box.full(shape)), ("half of each row", half)):
            part = values[box.slices]
            ours, counted, theirs = medians(
                rounds,
                lambda p=part, s=shape, b=box: kernels.digest(p, s, b),
                lambda p=part, s=shape, b=box: kernels.digest(p, s, b, [0]),
                lambda p=part: p.sum(),
            )
            size = part.numel() * dtype.itemsize / 1e9
            print(
                f"digest {str(dtype)[6:]:9} {name:18} {size / ours:6.2f} GB/s   "
                f"(torch's plain sum {size / theirs:6.2f} GB/s; x {counted / ours:.3f} where NaN "
                "is looked for)"
            )


def changes(rounds: int) -> None:
    """What a delta of 1 % runs through, from the sender's comparison to places in tiles."""
    shape, tiles = (16384, 1024), TileLayout(16)
    half = Box((0, 0), (shape[0], shape[1] // 2))  # as one of two ranks takes it
    copy, slot = torch.randn(shape).to(torch.bfloat16), WeightSlot("x", shape, half, "param", half)
    chosen = (torch.rand(copy.numel()) < 0.01).nonzero().flatten()

    def taken(run: Callable[..., Any]) -> Any:
        copy.view(-1)[chosen] *= -1  # in both sides' time
        return run(copy, new, copy.numel())

    new = copy.clone()
    codes, width = kernels.encode_gaps(chosen)
    steps: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "diff_update": (kernels.diff_update, taken),
        "encode_gaps": (kernels.encode_gaps, lambda run: run(chosen)),
        "decode_gaps": (
            kernels.decode_gaps, lambda run: run(codes, width, len(chosen), copy.numel())
        ),
        "scatter_indices": (
            kernels.scatter_indices, lambda run: run(chosen, slot, slot.put.shape, tiles)
        ),
    }  # fmt: skip
    for name, (op, call) in steps.items():
        ours, theirs = medians(
            rounds, lambda o=op, c=call: c(o), lambda o=op, c=call: c(o.reference)
        )
        print(f"{name:13} of {len(chosen)} in {copy.nbytes >> 20} MiB: {1e3 * ours:6.2f} ms"
              f"   (plain torch {1e3 * theirs:6.2f} ms)")  # fmt: skip


def copies(rounds: int) -> None:
    """Weights into place, more of them than caches hold: as they are, and turned into tiles."""
    shape, count = (5632, 2048), 16
    values = [torch.randn(shape).to(torch.bfloat16) for _ in range(count)]
    rows = [torch.zeros_like(value) for value in values]
    for layout in (PLAIN, TileLayout(16)):
        stored = [row.view(layout.storage_shape(shape)) for row in rows]

        def write(run: Callable[..., Any], layout: Any = layout, stored: Any = stored) -> None:
            for storage, value in zip(stored, values, strict=True):
                run(storage, shape, Box.full(shape), value, layout)

        ours, theirs = medians(
            rounds,
            lambda: write(kernels.copy_into_box),
            lambda: write(kernels.copy_into_box.reference),
        )
        size = sum(value.nbytes for value in values) / 1e9
        print(f"copy_into_box {layout.name:5} of {count} x {shape}: {size / ours:5.1f} GB/s"
              f"   (plain torch {size / theirs:5.1f} GB/s)")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--only",
        help="attention, codes, contexts, linears, scans, filters, small_ops, digests, changes or "
        "copies",
    )
    parser.add_argument("--quick", action="store_true", help="shorter prefills only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{native_status()}; {options.threads} thread(s)")
    with torch.inference_mode():
        parts = {
            "attention": lambda: attention(options.rounds, options.quick),
            "codes": lambda: codes(options.rounds, options.quick),
            "contexts": lambda: long_contexts(options.rounds, options.threads),
            "linears": lambda: linears(options.rounds),
            "scans": lambda: scans(options.rounds),
            "filters": lambda: filters(options.rounds),
            "small_ops": lambda: small_ops(options.rounds),
            "digests": lambda: digests(options.rounds),
            "changes": lambda: changes(options.rounds),
            "copies": lambda: copies(options.rounds),
        }
        for name, run in parts.items():
            if options.only in (None, name):
                run()


if __name__ == "__main__":
    main()
