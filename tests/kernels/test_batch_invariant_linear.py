"""Rows of ``batch_invariant_linear`` have the same bits in any batch, on any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels.backends import backends

from rollout.kernels import batch_invariant_linear, linear
from rollout.weights import PLAIN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (67, 101), (130, 1000), (3, 5)], ids=str)
@pytest.mark.usefixtures("dots_in_order")
def test_a_row_has_the_same_bits_in_any_batch(
    shape: tuple[int, int], dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=rng).to(dtype)
    bias = torch.randn(shape[0], generator=rng).to(dtype)
    x = torch.randn(300, shape[1] + 7, generator=rng).to(dtype)[:, 3:-4]
    exact = linear.reference(x.double(), weight.double(), bias.double(), PLAIN, shape)
    for name, run in backends(batch_invariant_linear).items():
        set_threads(1)
        together = run(x, weight, bias, PLAIN, shape)
        relative = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(together.double(), exact, rtol=relative, atol=1e-4)
        if name == "reference":
            continue
        for cuts in ((1,) * 300, (2, 3, 4, 5, 286), (64, 17, 219), (299, 1)):
            slow = name == "triton" and not torch.cuda.is_available()  # the interpreter
            if slow and (len(cuts) > 4 or shape[1] > 500):
                continue
            set_threads(1 + len(cuts) % 2)
            parts = [run(r, weight, bias, PLAIN, shape) for r in x.split(cuts)]
            assert torch.equal(torch.cat(parts), together), f"{name} cut into {cuts[:3]} ..."
