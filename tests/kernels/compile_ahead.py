"""Compiles the Triton kernels for sm_90 without a card, as the shapes of real models launch them.

Run as a script, ``compile_ahead.py SHARE SHARES``, without TRITON_INTERPRET; prints one JSON line
for each kernel of its share: name, memory in bytes, and what went wrong. What the
interpreter hides shows here: types, layouts, memory. (Triton hangs when two threads compile: shares
are processes.) ``compile_ahead.py batches`` compiles nothing, and prints what kernels would be
compiled for in steps of several batches.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from rollout.kernels.digest_regions import DigestedAs
from rollout.kernels.gpu_launch import Launch, recorded
from rollout.kernels.kv_codes import LARGEST
from rollout.weights import PLAIN, Box
from rollout.weights.quantization import SCHEMES, Scheme

TARGET = GPUTarget("cuda", 90, 32)
BF16, FP32 = torch.bfloat16, torch.float32
_ONE_BYTE = tuple(LARGEST)
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.uint32: "*u32",
    torch.uint64: "*u64",
}


def kernel(name: str) -> Callable[..., Any]:
    """The Triton implementation of an op, whether or not it can run here."""
    return getattr(importlib.import_module(f"rollout.kernels.{name}.gpu"), name)  # type: ignore[no-any-return]


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ops as models call them: 8 B Llama (head dim 128) and smaller ones (64)."""
    x, weight = torch.zeros(3, 4096, dtype=BF16), torch.zeros(4096, dtype=BF16)
    yield "rms_norm", lambda: kernel("rms_norm")(x, weight, 1e-5)
    heads = torch.zeros(2, 48, 128, dtype=BF16)[:, :32]
    yield "rms_norm", lambda: kernel("rms_norm")(heads, weight[:128].clone(), 1e-5)
    yield "add_rms_norm", lambda: kernel("add_rms_norm")(x, x, weight, 1e-5)
    yield "add_rms_norm", lambda: kernel("add_rms_norm")(x, x, weight, 1e-5, 1.0)
    yield "silu_mul", lambda: kernel("silu_mul")(x)
    yield "swap_tensors", lambda: kernel("swap_tensors")(x, x.clone())
    pairs = torch.zeros(3, 2, dtype=torch.int64)
    yield "copy_slots", lambda: kernel("copy_slots")(x[None, :2], pairs)
    box = Box((0, 0), (3, 4096))
    yield "digest", lambda: kernel("digest")(x, (3, 4096), box)
    yield "digest", lambda: kernel("digest")(x, (3, 4096), box, [0])
    for wide in (x, x.float()):
        many, place = [wide, wide[:, 7:]], DigestedAs((3, 4096), box, BF16)
        part = DigestedAs((3, 4096), Box((0, 7), (3, 4096)), BF16)
        yield "copy_regions", lambda m=many: kernel("copy_regions")([x, x[:, 7:]], m)
        yield "digest_regions", lambda m=many, a=[place, part]: kernel("digest_regions")(m, a)
    yield "scan_logits", lambda: kernel("scan_logits")(torch.zeros(2, 128256, dtype=BF16))
    warm = torch.ones(2)
    yield "scan_logits", lambda: kernel("scan_logits")(torch.zeros(2, 32000), warm)
    for dtype in (BF16, FP32):
        w, y = torch.zeros(4096, 4096, dtype=dtype), x.to(dtype)
        yield (
            "batch_invariant_linear",
            lambda w=w, y=y: kernel("batch_invariant_linear")(y, w, None, PLAIN, w.shape),
        )
        yield (
            "batch_invariant_linear",
            lambda w=w, y=y: kernel("batch_invariant_linear")(y, w, None, PLAIN, w.shape, 4, True),
        )
    for dtype, vocab, n in ((BF16, 128256, 2), (BF16, 128256, 64), (FP32, 32000, 2)):
        rows, none = torch.zeros(n, vocab, dtype=dtype), torch.zeros(n, dtype=torch.int64)
        args = (rows, none, torch.ones(n, 3), none, torch.zeros(n, dtype=torch.float64))
        yield "sample", lambda args=args: kernel("sample")(*args)
    yield from _attentions()
    yield from _selections()
    yield from _experts()
    yield from _linears()
    yield from _deltas()
    yield from _adapters()
    yield from _others()


def _others() -> Iterator[tuple[str, Callable[[], Any]]]:
    """What differs by its constants in other models: Gemma's vocabulary; Qwen2.5's heads, seven to
    one, heads of 96 and of 192, and blocks of 128; hidden sizes of 896 and 7168; a bias of one row;
    regions of other dtypes.
    """
    none = torch.zeros(2, dtype=torch.int64)
    draws = torch.zeros(2, 262144, dtype=BF16), none, torch.ones(2, 3), none, none.double()
    yield "sample", lambda: kernel("sample")(*draws)
    lengths, table = torch.tensor([40, 40]).int(), torch.zeros(2, 64, dtype=torch.int32)
    for heads, kv_heads, dim, block in ((28, 4, 128, 32), (32, 32, 96, 128), (32, 8, 192, 16)):
        kv = torch.zeros(9, kv_heads, block, dim, dtype=BF16)
        for tokens in (2, 80):
            q = torch.zeros(tokens, heads, dim, dtype=BF16)
            starts = torch.tensor([0, tokens // 2, tokens]).int()
            args = (q, kv, kv.clone(), starts, lengths, table, 0.1)
            yield "paged_attention", lambda args=args: kernel("paged_attention")(*args)
        q, k, turn = (
            torch.zeros(2, *n, dtype=BF16) for n in ((heads, dim), (kv_heads, dim), (dim,))
        )
        args = (q, k, k.clone(), turn, turn, kv, kv.clone(), none)
        yield "rope_and_cache", lambda args=args: kernel("rope_and_cache")(*args)
    for size in (896, 7168):
        x, weight = torch.zeros(1, size, dtype=BF16), torch.zeros(size, dtype=BF16)
        yield "add_rms_norm", lambda x=x, w=weight: kernel("add_rms_norm")(x, x, w, 1e-5)
        args = (x, torch.zeros(256, size, dtype=BF16), weight[:256].clone(), PLAIN, (256, size))
        yield "linear", lambda args=args: kernel("linear")(*args)
    box = Box((0, 0), (3, 4096))
    half = torch.float16
    for given, wanted in ((half, BF16), (BF16, half), *((d, d) for d in (*_ONE_BYTE, FP32, half))):
        x, y = torch.zeros(3, 4096, dtype=given), torch.zeros(3, 4096, dtype=wanted)
        place = DigestedAs((3, 4096), box, wanted)
        part = DigestedAs((3, 4096), Box((0, 7), (3, 4096)), wanted)
        yield "copy_regions", lambda x=x, y=y: kernel("copy_regions")([y, y[:, 7:]], [x, x[:, 7:]])
        regions = [x, x[:, 7:]], [place, part]
        yield "digest_regions", lambda regions=regions: kernel("digest_regions")(*regions)


def _adapters() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Queries, keys and values of an 8 B Llama, 16 adapters of rank 16; rank 64 of one part."""
    rows = torch.zeros(64, dtype=torch.int32)
    tiles = torch.zeros(16, 3, dtype=torch.int32)
    ranks = (BF16, 16, (0, 4096, 5120, 6144)), (BF16, 64, (0, 4096)), (FP32, 64, (0, 4096))
    for dtype, rank, edges in ranks:
        parts, outputs = len(edges) - 1, edges[-1]
        y, x = torch.zeros(64, outputs, dtype=dtype), torch.zeros(64, 4096, dtype=dtype)
        a = torch.zeros(16, parts, rank, 4096, dtype=dtype)
        b, scales = torch.zeros(16, rank, outputs, dtype=dtype), torch.zeros(16, parts)
        args = (y, x, a, b, scales, edges, rows, tiles)
        yield "lora_linear", lambda args=args: kernel("lora_linear")(*args)


def _deltas() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Qwen3-Next's, of one rank in two; Granite 4's."""
    slots, starts = torch.zeros(2, dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    where = (slots, starts, torch.tensor([40, 40], dtype=torch.int32))
    for dtype in (BF16, FP32):
        x, weight = torch.zeros(2, 4096, dtype=dtype), torch.zeros(4096, 4, dtype=dtype)
        args = (x, weight, torch.zeros(3, 4096, 3, dtype=dtype), *where)
        yield "causal_conv", lambda args=args: kernel("causal_conv")(*args)
        args = (*args, torch.zeros(4096, dtype=dtype))
        yield "causal_conv", lambda args=args: kernel("causal_conv")(*args)
        q, v = torch.zeros(2, 8, 128, dtype=dtype), torch.zeros(2, 16, 128, dtype=dtype)
        args = (q, q.clone(), v, *torch.zeros(2, 2, 16), torch.zeros(3, 16, 128, 128), *where)
        yield "gated_delta_rule", lambda args=args: kernel("gated_delta_rule")(*args)
        args = (*args[:3], torch.zeros(2, 16, 128), *args[4:])  # Kimi's
        yield "gated_delta_rule", lambda args=args: kernel("gated_delta_rule")(*args)
        x, b = torch.zeros(2, 48, 64, dtype=dtype), torch.zeros(2, 1, 128, dtype=dtype)
        numbers = (torch.zeros(2, 48), *torch.zeros(2, 48), torch.zeros(3, 48, 128, 64))
        args = (x, b, b.clone(), *numbers, *where)
        yield "ssd_scan", lambda args=args: kernel("ssd_scan")(*args)


def _attentions() -> Iterator[tuple[str, Callable[[], Any]]]:
    for dtype, heads, dim in ((BF16, 32, 128), (BF16, 32, 64), (BF16, 16, 256), (FP32, 32, 128)):
        kv, table = torch.zeros(9, 8, 32, dim, dtype=dtype), torch.zeros(2, 128, dtype=torch.int32)
        lengths = torch.tensor([40, 40], dtype=torch.int32)
        for name, tokens in (("paged_attention", 2), ("paged_attention", 80)):
            if dtype == BF16 and dim == 128:  # an argument of 1 is compiled as a constant
                one = torch.tensor([0, tokens], dtype=torch.int32)
                args = (torch.zeros(tokens, heads, dim, dtype=dtype), kv, kv.clone(), one)
                yield (
                    name,
                    lambda n=name, a=args, c=lengths, t=table: kernel(n)(*a, c[:1], t[:1], 0.1),
                )
            q = torch.zeros(tokens, heads, dim, dtype=dtype)
            starts = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)
            args = (q, kv, kv.clone(), starts, lengths, table, 0.1)
            yield name, lambda name=name, args=args: kernel(name)(*args)
            sinks = torch.zeros(heads, dtype=dtype)
            if dtype == BF16 and dim != 128:
                rest = (64, 0.0, sinks) if dim == 64 else (64, 50.0)
                yield name, lambda name=name, args=args, r=rest: kernel(name)(*args, *r)
            if dtype == BF16 and dim == 256:  # DeepSeek's latent attention
                q, kv1 = torch.zeros(tokens, 16, 576, dtype=dtype), torch.zeros(9, 1, 32, 576)
                args = (q, kv1.to(dtype), kv1.to(dtype), starts, lengths, table, 0.1)
                yield name, lambda name=name, args=args: kernel(name)(*args)
            for kind in LARGEST if dtype == BF16 and dim == 128 else ():
                pages, scales = kv.to(kind), torch.zeros(kv.shape[:3])
                args = (q, pages, pages.clone(), starts, lengths, table, 0.1, 0, 0.0, None)
                args = (*args, scales, scales)
                yield name, lambda name=name, args=args: kernel(name)(*args)
        if dtype == BF16 and dim < 256:
            q, k = torch.zeros(2, 32, dim, dtype=dtype), torch.zeros(2, 8, dim, dtype=dtype)
            turn = torch.zeros(2, dim, dtype=dtype)
            slots = torch.zeros(2, dtype=torch.int64)
            args = (q, k, k.clone(), turn, turn, kv, kv.clone(), slots)
            yield "rope_and_cache", lambda args=args: kernel("rope_and_cache")(*args)
            norm = (torch.zeros(dim, dtype=dtype), torch.zeros(dim, dtype=dtype), 1e-6, None)
            args = (*args[:3], *norm, *args[3:])
            yield "norm_rope_and_cache", lambda a=args: kernel("norm_rope_and_cache")(*a)
            for kind in LARGEST if dim == 128 else ():
                pages, scales = kv.to(kind), torch.zeros(kv.shape[:3])
                coded = (*args[:-3], pages, pages.clone(), slots, scales, scales.clone())
                yield "norm_rope_and_cache", lambda a=coded: kernel("norm_rope_and_cache")(*a)
    q, k, t = torch.zeros(2, 32, 80), torch.zeros(2, 8, 80), torch.zeros(2, 20)
    cache, slots = torch.zeros(9, 8, 32, 80), torch.zeros(2, dtype=torch.int64)
    args = (q, k, k.clone(), t, t, cache, cache.clone(), slots)
    yield "rope_and_cache", lambda: kernel("rope_and_cache")(*args)
    weights = torch.zeros(80), torch.zeros(80), 1e-6, 1.0
    normed = (*args[:3], *weights, *args[3:])
    yield "norm_rope_and_cache", lambda: kernel("norm_rope_and_cache")(*normed)


def _selections() -> Iterator[tuple[str, Callable[[], Any]]]:
    """DeepSeek-V3.2's."""
    starts, lengths = torch.tensor([0, 1, 2]).int(), torch.tensor([40, 40]).int()
    keys, table = torch.zeros(9, 1, 32, 128, dtype=BF16), torch.zeros(2, 128, dtype=torch.int32)
    q = torch.zeros(2, 64, 128, dtype=BF16)
    args = (q, torch.zeros(2, 64), keys, starts, lengths, table, 2048)
    yield "select_tokens", lambda: kernel("select_tokens")(*args)


def _linears() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Of few rows: those of 8 B parameters."""
    for rows in (1, 8):
        for outputs, inputs in ((6144, 4096), (28672, 4096), (4096, 14336)):
            x, weight = (
                torch.zeros(rows, inputs, dtype=BF16),
                torch.zeros(outputs, inputs, dtype=BF16),
            )
            args = (x, weight, None, PLAIN, (outputs, inputs))
            yield "linear", lambda args=args: kernel("linear")(*args)
            yield "gated_linear", lambda args=args: kernel("gated_linear")(*args)


def _experts() -> Iterator[tuple[str, Callable[[], Any]]]:
    w13, w2 = torch.zeros(8, 1536, 2048, dtype=BF16), torch.zeros(8, 2048, 768, dtype=BF16)
    for tokens in (2, 128):
        x, chosen = torch.zeros(tokens, 2048, dtype=BF16), torch.zeros(tokens, 4, dtype=torch.int64)
        weights = torch.zeros(tokens, 4)
        args = (x, w13, w2, chosen, weights)
        yield "fused_experts", lambda args=args: kernel("fused_experts")(*args)
        stacked = (w13.mT.contiguous().mT, w2.mT.contiguous().mT, chosen, weights, 0)
        args = (x, *stacked, w13[:, :, 0].contiguous(), w2[:, :, 0].contiguous(), (1.7, 7.0))
        yield "fused_experts", lambda args=args: kernel("fused_experts")(*args)
        for scheme in SCHEMES.values():
            yield from _of_codes(x, w13[0], scheme)
            codes: list[torch.Tensor] = []
            for w in (w13, w2):
                rows, columns = w.shape[1:]
                kept = (8, rows, columns // scheme.per_byte), scheme.storage_dtype
                cells = (8, rows, scheme.cells((rows, columns))), scheme.scale_dtype
                codes += [torch.zeros(shape, dtype=dtype) for shape, dtype in (kept, cells)]
            args = (x, *codes, chosen, weights, scheme)
            yield "quantized_experts", lambda args=args: kernel("quantized_experts")(*args)


def _of_codes(x: Tensor, weight: Tensor, scheme: Scheme) -> Iterator[tuple[str, Callable[[], Any]]]:
    rows, columns = weight.shape
    codes = torch.zeros(rows, columns // scheme.per_byte, dtype=scheme.storage_dtype)
    scales = torch.zeros(rows, scheme.cells((rows, columns)), dtype=scheme.scale_dtype)
    yield "dequantize", lambda: kernel("dequantize")(codes, scales, scheme, BF16)
    if scheme.columns and len(x) <= 64:
        args = (x, codes, scales, None, PLAIN, (rows, columns), scheme)
        yield "quantized_linear", lambda: kernel("quantized_linear")(*args)


def specialised(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """What a launch with these arguments is compiled for: types, constants, what 16 divides."""
    names = launch.kernel.arg_names
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    attributes: dict[tuple[int, ...], Any] = {}
    for index, value in enumerate(launch.arguments):
        name, even = names[index], False
        any_number = launch.kernel.params[index].do_not_specialize
        if isinstance(value, Tensor):
            signature[name], even = _TYPES[value.dtype], value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not any_number:
            constants[name] = 1
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            even = value % 16 == 0 and not any_number
        if even:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return {name: signature.get(name, "constexpr") for name in names}, constants, attributes


def compile_launch(launch: Launch) -> Any:
    """The compiled kernel, specialised as a launch with these arguments would be."""
    source = ASTSource(launch.kernel, *specialised(launch))
    options = {
        "num_warps": launch.warps,
        "num_stages": launch.stages,
        "enable_fp_fusion": launch.contract,
    }
    return triton.compile(source, target=TARGET, options=options)


def batches() -> Iterator[tuple[int, list[Launch]]]:
    """What a layer launches for prompts of some batches: one and more, of round numbers or not."""
    kv, x, weight = (torch.zeros(9, 8, 32, 128, dtype=BF16), *torch.zeros(2, 1, 4096, dtype=BF16))
    index = torch.zeros(9, 1, 32, 128, dtype=BF16)
    for tokens, sequences, width in ((2000, 1, 1), (2000, 16, 160), (1999, 3, 129), (64, 64, 16)):
        starts = torch.linspace(0, tokens, sequences + 1).int()
        lengths = torch.full((sequences,), 32, dtype=torch.int32)
        table = torch.zeros(sequences, width, dtype=torch.int32)
        q, rows = torch.zeros(tokens, 32, 128, dtype=BF16), x.expand(tokens, -1).contiguous()
        arguments = (q, kv, kv, starts, lengths, table, 0.1)
        matrix = torch.zeros(64, 4096, dtype=BF16)
        linear = (rows, matrix, None, PLAIN, (64, 4096))
        with recorded() as launches:
            kernel("add_rms_norm")(rows, rows, weight[0], 1e-5)
            kernel("paged_attention")(*arguments)
            kernel("batch_invariant_linear")(*linear)
            kernel("select_tokens")(q, rows[:, :32], index, starts, lengths, table, 16)
        yield tokens, launches


def _waits(ptx: str, weights_first: bool) -> bool | None:
    """Whether the kernel waits for the one before it ahead of all that it reads and writes, but
    for weights that it reads first; None: it does not overlap.
    """
    wait = ptx.find("griddepcontrol.wait")
    if wait < 0:
        return None
    accesses = ["ld.global", "st.global", "cp.async", "atom.global"]
    if weights_first:
        return ptx.find("ld.global") < wait < ptx.find("st.global")
    return all(wait < at for op in accesses if (at := ptx.find(op)) >= 0)


def _spills(ptx: str) -> int:
    """Bytes of registers that a thread writes to memory, for want of room."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stderr.split(" bytes spill stores")[0].rsplit(maxsplit=1)[-1])


def main() -> None:
    """Record what the calls launch, compile each once, print what came of it."""
    found: dict[str, tuple[str, Launch]] = {}
    for name, call in calls():
        with recorded() as launches:
            call()
        for launch in launches:
            constants = ", ".join(f"{k}={v}" for k, v in launch.constants.items())
            kinds = ", ".join(str(a.dtype)[6:] for a in launch.arguments if isinstance(a, Tensor))
            found.setdefault(f"{launch.kernel.__name__}({kinds}; {constants})", (name, launch))

    if sys.argv[1] == "batches":
        for tokens, launches in batches():
            for launch in launches:
                constants = sorted(map(str, launch.constants.items()))
                key = [launch.kernel.__name__, launch.warps, launch.stages, constants]
                print(json.dumps([key, tokens, repr(specialised(launch))]), flush=True)
        return
    share, shares = (int(word) for word in sys.argv[1:3])
    for what, (op, launch) in list(found.items())[share::shares]:
        row: dict[str, Any] = {"op": op, "kernel": what}
        try:
            compiled = compile_launch(launch)
            row["shared"] = compiled.metadata.shared
            row["waits"] = _waits(compiled.asm["ptx"], launch.kernel.__name__ == "_one")
            row["words"] = "ld.global.v4" in compiled.asm["ptx"]
            row["contracts"] = "fma." in compiled.asm["ptx"]
            row["spills"] = _spills(compiled.asm["ptx"])
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
