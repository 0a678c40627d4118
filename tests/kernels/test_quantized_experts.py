"""A mixture whose experts are held in int8: one native call, the bits of product by product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.backends import backends
from torch import Tensor

from rollout.kernels import dequantize, fused_experts, quantized_experts, quantized_linear
from rollout.kernels.gpu_support import triton_runs
from rollout.kernels.quantized_experts import cpu
from rollout.weights import PLAIN
from rollout.weights.quantization import SCHEMES, Scheme

INT8 = SCHEMES["int8"]
# Rows that vectors and blocks of outputs do not divide, experts without a token, no token.
SIZES = ((1, 4, 64, 32, 2), (5, 6, 64, 24, 2), (33, 8, 100, 30, 3), (9, 16, 256, 66, 4))


def held(count: int, hidden: int, inner: int, seed: int = 0, scheme: Scheme = INT8) -> list[Tensor]:
    generator, found = torch.Generator().manual_seed(seed), []
    for shape in ((2 * inner, hidden), (hidden, inner)):
        made = [scheme.quantize(torch.randn(shape, generator=generator) / 8) for _ in range(count)]
        found += [torch.stack([pair[part] for pair in made]) for part in (0, 1)]
    return found


def routed(tokens: int, count: int, hidden: int, chosen: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 2, hidden, generator=generator)[:, 0].bfloat16()
    experts = torch.rand(tokens, count, generator=generator).argsort(dim=1)[:, :chosen]
    return x, experts, torch.rand(tokens, chosen, generator=generator).to(dtype)


@pytest.mark.parametrize("size", [*SIZES, (0, 4, 32, 32, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_call_gives_the_bits_of_product_by_product(set_threads, size, dtype) -> None:
    tokens, count, hidden, inner, chosen = size
    weights, (x, experts, shares) = (
        held(count, hidden, inner),
        routed(tokens, count, hidden, chosen, dtype),
    )
    for first, last in ((0, count), (1, count - 1)):  # of all ranks, of one amid them
        some = [tensor[first:last] for tensor in weights]
        wanted = quantized_experts.reference(x, *some, experts, shares, INT8, first)
        for threads in (1, 2):
            set_threads(threads)
            assert torch.equal(
                cpu.quantized_experts(x, *some, experts, shares, INT8, first), wanted
            )


def test_what_is_no_number_stays_none() -> None:
    weights, (x, experts, shares) = held(4, 64, 32), routed(3, 4, 64, 2, torch.bfloat16)
    x[1, 5] = float("nan")
    out = quantized_experts(x, *weights, experts, shares, INT8)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_a_token_is_the_sum_of_its_experts_linears() -> None:
    weights, (x, experts, shares) = held(6, 64, 24), routed(5, 6, 64, 2, torch.float32)
    w13, s13, w2, s2 = weights
    wanted = torch.zeros(5, 64)
    for token in range(5):
        for expert, share in zip(experts[token].tolist(), shares[token], strict=True):
            both = quantized_linear(x[token], w13[expert], s13[expert], None, PLAIN, (48, 64), INT8)
            inner = torch.nn.functional.silu(both[:24]) * both[24:]
            down = quantized_linear(inner, w2[expert], s2[expert], None, PLAIN, (64, 24), INT8)
            wanted[token] += share * down
    out = quantized_experts(x, *weights, experts, shares, INT8)
    # torch's silu may round otherwise in another shape, by which a code may be another one.
    torch.testing.assert_close(out.float(), wanted, rtol=2**-7, atol=4e-3)


# How the two halves are multiplied, with biases or without.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clamped": {"clamped": (1.7, 0.6)},
    "squared": {"squared": True},
}


@pytest.mark.skipif(not triton_runs(), reason="needs Triton")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_gpu_multiplies_what_codes_stand_for(name: str, way: str) -> None:
    """As ``fused_experts`` of weights that were dequantised before; int8 as product by product. Of
    experts in the middle of all.
    """
    scheme, (hidden, inner, count, first) = SCHEMES[name], (160, 96, 5, 2)
    x, experts, shares = routed(7, 9, hidden, 3, torch.float32)
    options, tables = WAYS[way], held(count, hidden, inner, scheme=scheme)
    if way == "squared":
        tables[:2] = [each[:, :inner].contiguous() for each in tables[:2]]
    if way == "clamped":
        biases = [torch.linspace(-1, 1, count * n).view(count, n) for n in (2 * inner, hidden)]
        options = options | dict(zip(("b13", "b2"), biases, strict=True))
    run = backends(quantized_experts)["triton"]
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        kept = {k: v.to(dtype) if k in ("b13", "b2") else v for k, v in options.items()}
        arguments = _in_order(given, *tables, experts, shares, scheme, first, **kept)
        out = run(*arguments)
        if name == "int8":
            wanted = quantized_experts.reference(*arguments)
            torch.testing.assert_close(out, wanted, rtol=2**-7, atol=2e-2)
            continue
        w13, w2 = (dequantize(*tables[i : i + 2], scheme, dtype) for i in (0, 2))
        plain = arguments[8:]
        wanted = backends(fused_experts)["triton"](given, w13, w2, experts, shares, *plain)
        if dtype == torch.float32:
            assert torch.equal(out, wanted)
        torch.testing.assert_close(out, wanted, rtol=2**-6, atol=1e-3)


@pytest.mark.skipif(not triton_runs(), reason="needs Triton")
@pytest.mark.parametrize(
    ("name", "table", "bad"),
    [
        ("fp8", 2, 0x7F),  # a code; of four bits all are numbers
        ("fp8_block", 2, 0x7F),
        ("fp8", 3, float("nan")),  # a scale
        ("fp8_block", 3, float("nan")),
        ("mxfp4", 3, 255),
    ],
)
def test_on_a_gpu_codes_and_scales_that_stand_for_nothing_do(
    name: str, table: int, bad: float
) -> None:
    scheme, tables = SCHEMES[name], held(5, 160, 96, scheme=SCHEMES[name])
    tables[table][3, 1, 0] = bad
    x, experts, shares = routed(7, 9, 160, 3, torch.float32)
    arguments = _in_order(x.float(), *tables, experts, shares, scheme, 2)
    wanted = quantized_experts.reference(*arguments).isnan()
    assert wanted.any()
    assert torch.equal(backends(quantized_experts)["triton"](*arguments).isnan(), wanted)


def _in_order(
    *given: Any,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    clamped: tuple[float, float] | None = None,
    squared: bool = False,
) -> tuple[Any, ...]:
    """Arguments of ``quantized_experts`` as its implementations take them."""
    return *given, b13, b2, clamped, squared
