"""Autograd functions whose forward is an op of the engine and whose backward is plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollout.kernels import batch_invariant_linear
from rollout.weights import PLAIN, Box, Layout, TileLayout

Run = Callable[..., Tensor]


def through(run: Run, plain: Run, *inputs: Tensor | None) -> Tensor:
    """``run(*inputs)``, with the gradients of ``plain(*inputs)``, which is computed again for them.

    ``plain``: what ``run`` computes, in plain torch: an op's own ``reference``. An input that is
    None stays None.
    """
    found: Tensor = _Through.apply(run, plain, *inputs)  # type: ignore[no-untyped-call]
    return found


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout, segments: int = 1
) -> Tensor:
    """``batch_invariant_linear`` of a weight [outputs, inputs] as a trainer has it.

    x: [..., inputs]. It is laid out as the engine has it (``layout``) for the length of the call:
    rows of an output do not depend on those beside them, so a part of what the engine has fused
    gives the bits of the whole. Gradients are those of ``F.linear``.
    """
    found: Tensor = _Linear.apply(x, weight, bias, layout, segments)  # type: ignore[no-untyped-call]
    return found


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, plain: Run, *inputs: Tensor | None) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        pairs = zip(ctx.saved_tensors, wanted, strict=True)
        inputs = [None if x is None else x.detach().requires_grad_(needs) for x, needs in pairs]
        with torch.enable_grad():
            out = ctx.plain(*inputs)
        sought = [x for x in inputs if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(out, sought, grad))
        return None, None, *(next(found) if needs else None for needs in wanted)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout, segments: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        outputs = len(weight)
        storage, bias, shape = _laid_out(weight, bias, layout)
        y = batch_invariant_linear(x, storage, bias, layout, shape, segments)
        return y if shape[0] == outputs else y[..., :outputs].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            (rows @ weight).view(x.shape) if of_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            rows.sum(0) if of_bias else None,
            None,
            None,
        )


def _laid_out(
    weight: Tensor, bias: Tensor | None, layout: Layout
) -> tuple[Tensor, Tensor | None, tuple[int, int]]:
    """Weight, bias and shape as ``layout`` has them, with rows of zeros that fill the last tile."""
    outputs, inputs = weight.shape
    if not isinstance(layout, TileLayout):
        assert layout is PLAIN
        return weight.contiguous(), bias, (outputs, inputs)
    shape = (-(-outputs // layout.rows) * layout.rows, inputs)
    storage = weight.new_zeros(layout.storage_shape(shape))
    layout.write(storage, shape, Box.full((outputs, inputs)), weight)
    if bias is not None and shape[0] > outputs:
        bias = torch.nn.functional.pad(bias, (0, shape[0] - outputs))
    return storage, bias, shape
