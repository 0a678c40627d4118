"""A mixture whose experts are held in int8: one native call, the bits of product by product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollout.kernels import quantized_experts, quantized_linear
from rollout.kernels.quantized_experts import cpu
from rollout.weights import PLAIN
from rollout.weights.quantization import SCHEMES

INT8 = SCHEMES["int8"]
# Rows that vectors and blocks of outputs do not divide, experts without a token, no token.
SIZES = ((1, 4, 64, 32, 2), (5, 6, 64, 24, 2), (33, 8, 100, 30, 3), (9, 16, 256, 66, 4))


def held(count: int, hidden: int, inner: int, seed: int = 0) -> list[Tensor]:
    generator, found = torch.Generator().manual_seed(seed), []
    for shape in ((2 * inner, hidden), (hidden, inner)):
        made = [INT8.quantize(torch.randn(shape, generator=generator) / 8) for _ in range(count)]
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
