"""Quantised weights beside bfloat16: linears alone, decoding, memory, updates, and logprobs.

    python benchmarks/quantized.py linears [--threads N]
    python benchmarks/quantized.py fp8 [--threads N] [--rounds 3]
    python benchmarks/quantized.py experts [--threads N] [--rounds 3]
    python benchmarks/quantized.py again
    python benchmarks/quantized.py cells
    python benchmarks/quantized.py engine CHECKPOINT [--schemes none,int8,...] [--threads N]
        [--batches 1,8] [--new 64] [--rounds 3] [--tokens 2048]

``linears`` times this package's bfloat16 tiles, its int8 ones and torch's ``_int_mm`` (with the
quantisation of the inputs) over 300 MB of equal weights, so that none stays in a cache; the best of
several passes. ``fp8`` times, in turns, its bfloat16 tiles, a product of codes of each other
scheme, one of float8 that is dequantised for it, and torch's ``_scaled_mm``: medians. ``experts``
times a mixture's experts, bfloat16 and int8 in turns: medians,
and the median ratio of a pair. ``again`` quantises what codes stand for once more, of scales that
our quantiser chose and of others, and says what changes. ``cells`` counts the bytes of a delta
of a bfloat16 matrix in which some elements, anywhere, have changed. ``engine`` starts an engine of
each scheme on a checkpoint (``make_checkpoint.py`` writes some), all at once and asked in turns:
generated tokens per second, the best of the rounds; bytes of weights; seconds of an update that
sends all tensors from this process; and the logprobs that it gives to tokens sampled by the
bfloat16 engine, less that engine's own for the same prompt.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rollout import Rollout, SamplingParams
from rollout.kernels import (
    dequantize,
    fused_experts,
    linear,
    quantize,
    quantized_experts,
    quantized_linear,
)
from rollout.kernels.quantized_linear import quantize_rows
from rollout.weight_sync.protocol.cells import encode_cells
from rollout.weight_sync.protocol.delta import encode
from rollout.weights import PLAIN, Box, Layout, TileLayout
from rollout.weights.cells import CellGrid
from rollout.weights.files import open_weights
from rollout.weights.quantization import SCHEMES

SHAPES = ((2048, 2048), (16384, 2048), (2048, 8192))  # outputs, inputs: of Llama-3.2-1B
MIXTURES = (
    (16, 256, 128, 4),
    (32, 1024, 512, 4),
    (64, 2048, 768, 8),
)  # experts, hidden, inner, chosen
ROWS = (1, 4, 8, 16, 32, 64, 256)
WEIGHTS = 300_000_000  # elements of one shape
PROMPT = 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("linears", "fp8", "experts", "again", "cells", "engine"))
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--schemes", default="none,int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.what == "linears":
        linears()
    elif args.what == "fp8":
        fp8(args.rounds)
    elif args.what == "experts":
        experts(args.rounds)
    elif args.what == "again":
        again()
    elif args.what == "cells":
        cells()
    elif args.checkpoint is None:
        parser.error("engine needs a CHECKPOINT")
    else:
        engines(args)


def fp8(rounds: int) -> None:
    for shape in SHAPES:
        weight, tiles, whole = torch.randn(shape).bfloat16(), TileLayout(), Box.full(shape)
        wide = torch.empty(tiles.storage_shape(shape), dtype=torch.bfloat16)
        tiles.write(wide, shape, whole, weight)
        held = {name: quantize(weight, SCHEMES[name]) for name in ("fp8", "fp8_block", "mxfp4")}
        codes, scales = held["fp8"]
        fours, layouts = TileLayout(inputs=4), {}
        for name in ("fp8", "fp8_block"):
            plain, own = held[name]
            tiled = torch.empty(fours.storage_shape(shape), dtype=plain.dtype)
            fours.write(tiled, shape, whole, plain)
            held[name], layouts[name] = (tiled, own), fours
        for rows in (1, 8, 64, 256):
            x = torch.randn(rows, shape[1]).bfloat16()
            runs: dict[str, Callable[[], object]] = {
                "bfloat16": partial(linear, x, wide, None, tiles, shape),
                **{
                    name: partial(
                        quantized_linear,
                        x,
                        *pair,
                        None,
                        layouts.get(name, PLAIN),
                        shape,
                        SCHEMES[name],
                    )
                    for name, pair in held.items()
                },
                "dequantised": partial(dequantised, x, codes, scales),
                "_scaled_mm": partial(scaled_mm, x, codes, scales),
            }
            found = in_turns(runs, rounds)
            said = ", ".join(f"{name} {time * 1e3:.2f}" for name, time in found.items())
            print(f"{shape[0]} x {shape[1]}, {rows} rows, ms: {said}", flush=True)


def dequantised(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """As float8 in rows is multiplied here: of the weight in bfloat16, made for each product."""
    return torch.nn.functional.linear(x, dequantize(codes, scales, SCHEMES["fp8"], torch.bfloat16))


def scaled_mm(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The library's product: with one scale of each side, those of rows outside of it."""
    quantized, factors = quantize_rows(x, SCHEMES["fp8"])
    one = torch.ones(())
    out = torch._scaled_mm(
        quantized, codes.view(torch.float8_e4m3fn).t(), one, one, out_dtype=torch.float32
    )
    return (out * (factors * scales[:, 0])).to(x.dtype)


def in_turns(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, after a turn that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(found) for name, found in times.items()}


def experts(rounds: int) -> None:
    scheme = SCHEMES["int8"]
    for count, hidden, inner, chosen in MIXTURES:
        codes, wide = [], []
        for shape in ((2 * inner, hidden), (hidden, inner)):
            weights = [torch.randn(shape).bfloat16() / 16 for _ in range(count)]
            wide.append(torch.stack(weights))
            codes += [
                torch.stack(part) for part in zip(*map(scheme.quantize, weights), strict=True)
            ]
        for rows in (1, 8, 64, 256):
            x, shares = torch.randn(rows, hidden).bfloat16(), torch.rand(rows, chosen).bfloat16()
            times: tuple[list[float], list[float]] = [], []
            for _ in range(8 * rounds):
                routed = torch.rand(rows, count).argsort(dim=1)[:, :chosen]
                runs = (
                    partial(fused_experts, x, *wide, routed, shares),
                    partial(quantized_experts, x, *codes, routed, shares, scheme),
                )
                for run, found in zip(runs, times, strict=True):
                    started = time.perf_counter()
                    run()
                    found.append(time.perf_counter() - started)
            floats, ints = (statistics.median(found) * 1e3 for found in times)
            gain = statistics.median(a / b for a, b in zip(*times, strict=True))
            print(
                f"{count} experts of {hidden} x {inner}, {chosen} a token, {rows} rows: bfloat16 "
                f"{floats:.2f} ms, int8 {ints:.2f} ms ({gain:.2f}x)",
                flush=True,
            )


def again() -> None:
    weight = 0.05 * torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    for scheme in SCHEMES.values():
        # A quantiser that leaves some of the codes unused has larger scales.
        for name, by in (
            ("our", scheme),
            ("other", replace(scheme, largest=0.73 * scheme.largest)),
        ):
            codes, scales = by.quantize(weight)
            for dtype in (torch.float32, torch.bfloat16):
                values = scheme.dequantize(codes, scales, dtype)
                anew = scheme.quantize(values)
                changed = (anew[0] != codes).float().mean()
                differ = (scheme.dequantize(*anew, dtype) != values).float().mean()
                print(
                    f"{scheme.name}, {name} scales, {dtype}: {changed:.1%} of the codes change, "
                    f"{differ:.1%} of the values"
                )


def cells() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(2048, 2048, generator=generator).bfloat16()
    for changed in (1, 16, 256, 4096, 65536):
        new = old.clone()
        where = torch.randperm(old.numel(), generator=generator)[:changed]
        new.view(-1)[where] += 1
        plain = encode(old.clone(), new, old.nbytes)
        found = [f"single elements {plain.nbytes / old.nbytes:.2%}" if plain else "all of it"]
        for scheme in SCHEMES.values():
            grid = CellGrid.of(tuple(old.shape), scheme.cell(tuple(old.shape)))
            some = encode_cells(old.clone(), new, grid.cell, old.nbytes)
            found.append(f"{scheme.name} {some.nbytes / old.nbytes if some else 1:.2%}")
        print(f"{changed} of {old.numel()} elements changed: {', '.join(found)}")


def linears() -> None:
    scheme, fours, twos = SCHEMES["int8"], TileLayout(inputs=4), TileLayout()
    for shape in SHAPES:
        whole, count = Box.full(shape), max(2, WEIGHTS // (shape[0] * shape[1]))
        wide, tiles, plain = [], [], []
        weight = torch.randn(shape).bfloat16()
        codes, scales = quantize(weight, scheme)
        for _ in range(count):
            wide.append(torch.empty(twos.storage_shape(shape), dtype=torch.bfloat16))
            twos.write(wide[-1], shape, whole, weight)
            tiles.append(torch.empty(fours.storage_shape(shape), dtype=torch.int8))
            fours.write(tiles[-1], shape, whole, codes)
            plain.append(codes.clone())
        for rows in ROWS:
            x = torch.randn(rows, shape[1]).bfloat16()
            floats = best(partial(run_floats, x, wide, twos, shape)) / count * 1e3
            codes_in = partial(run_codes, x, scales=scales, shape=shape)
            tiled = best(partial(codes_in, tiles, layout=fours)) / count * 1e3
            library = best(partial(codes_in, plain, layout=PLAIN)) / count * 1e3
            print(
                f"{shape[0]} x {shape[1]}, {rows} rows: bfloat16 {floats:.3f} ms, int8 "
                f"{tiled:.3f} ms ({floats / tiled:.2f}x), _int_mm {library:.3f} ms",
                flush=True,
            )


def run_floats(x: Tensor, held: list[Tensor], layout: Layout, shape: tuple[int, int]) -> None:
    for one in held:
        linear(x, one, None, layout, shape)


def run_codes(
    x: Tensor, held: list[Tensor], layout: Layout, scales: Tensor, shape: tuple[int, int]
) -> None:
    for one in held:
        quantized_linear(x, one, scales, None, layout, shape, SCHEMES["int8"])


def best(run: Callable[[], object], passes: int = 5) -> float:
    """Seconds of the fastest of so many passes, after one that is not counted."""
    run()
    found = []
    for _ in range(passes):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return min(found)


def engines(args: argparse.Namespace) -> None:
    schemes = args.schemes.split(",")
    held: dict[str, Rollout] = {}
    try:
        for scheme in schemes:
            started = time.perf_counter()
            held[scheme] = Rollout(
                args.checkpoint, device="cpu", dtype="bfloat16", quantization=scheme,
                kv_cache_bytes=1 << 28, num_threads=args.threads, skip_tokenizer_init=True,
                enable_prefix_caching=False, max_model_len=2048,
            )  # fmt: skip
            weights = held[scheme].weight_info().memory["weights"]
            print(
                f"{scheme}: {weights / 1e9:.3f} GB of weights, started in "
                f"{time.perf_counter() - started:.1f} s",
                flush=True,
            )
        decode(args, held)
        mismatch(args, held)
        _, files = open_weights(args.checkpoint)
        tensors = {n: files.read(n, Box.full(m.shape)) for n, m in files.metadata().items()}
        for scheme, engine in held.items():
            for _ in range(2):  # the first one builds the shadow
                timings = engine.update_weights(tensors, timeout=300.0).timings
            print(f"{scheme}: update of all tensors {timings['total']:.2f} s")
    finally:
        for engine in held.values():
            engine.shutdown()


def decode(args: argparse.Namespace, held: dict[str, Rollout]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=args.new, ignore_eos=True)
    for batch in map(int, args.batches.split(",")):
        prompts = [[1 + (7 * i + 3 * j) % 200 for j in range(PROMPT)] for i in range(batch)]
        rates: dict[str, float] = {}
        for _ in range(args.rounds + 1):
            for scheme, engine in held.items():
                started = time.perf_counter()
                engine.generate(prompts, params)
                rate = batch * args.new / (time.perf_counter() - started)
                rates[scheme] = max(rates.get(scheme, 0.0), rate)
        first = next(iter(rates.values()))
        for scheme, rate in rates.items():
            print(f"batch {batch}, {scheme}: {rate:.2f} tokens/s ({rate / first:.2f}x)", flush=True)


def mismatch(args: argparse.Namespace, held: dict[str, Rollout]) -> None:
    first, *others = held.items()
    count = -(-args.tokens // 128)
    prompts = [[1 + (11 * i + 5 * j) % 200 for j in range(PROMPT)] for i in range(count)]
    sampled = first[1].generate(prompts, SamplingParams(max_tokens=128, seed=7, ignore_eos=True))
    whole = [p + list(out.outputs[0].token_ids) for p, out in zip(prompts, sampled, strict=True)]
    wanted = scores(first[1], whole)
    for scheme, engine in others:
        less = scores(engine, whole) - wanted
        print(
            f"{scheme} - {first[0]}, {less.numel()} tokens: mean {less.mean():+.4f}, mean of "
            f"absolutes {less.abs().mean():.4f}, 99% below {less.abs().quantile(0.99):.4f}, "
            f"mean KL (k3) {(less.exp() - 1 - less).mean():.5f}",
            flush=True,
        )


def scores(engine: Rollout, whole: list[list[int]]) -> torch.Tensor:
    """The logprob of each token behind the prompts, all by one prefill."""
    outputs = engine.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = [
        [out.prompt_logprobs[i][ids[i]] for i in range(PROMPT, len(ids))]
        for out, ids in zip(outputs, whole, strict=True)
    ]
    return torch.tensor(found, dtype=torch.float64)


if __name__ == "__main__":
    main()
