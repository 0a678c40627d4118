"""A linear map whose rows have the same bits in any batch, on any number of ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.kernels.linear import linear
from rollout.kernels.op import op
from rollout.weights import PLAIN, Box, Layout

SEGMENTS = 4  # at most; numbers of them are powers of two


@op
def batch_invariant_linear(
    x: Tensor,
    storage: Tensor,
    bias: Tensor | None,
    layout: Layout,
    shape: tuple[int, int],
    segments: int = 1,
    wide: bool = False,
) -> Tensor:
    """``linear``, where a row's bits depend on that row and the weight alone.

    Arguments and result as in ``linear``, whose sums may have another order. ``segments`` (1, 2 or
    4): equal stretches of the inputs that are summed by themselves in float32; their sums are
    added by ``tree_sum``, then comes the bias, and rounding once. ``wide``: what that tree gives,
    in float32 and without a bias: the branch of a rank that holds neighbouring segments. Whole
    trees become a result by ``finish_sums``.

    This reference takes row by row; torch's own order still depends on the number of threads, the
    native one on nothing.
    """
    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        empty = linear.reference(x, storage, bias, layout, shape)
        return empty.to(_wide(x)) if wide else empty
    if segments == 1 and not wide:
        each = [linear.reference(row, storage, bias, layout, shape) for row in rows[:, None]]
        return torch.cat(each).view(*x.shape[:-1], shape[0])
    weight = storage if layout.name == "plain" else layout.read(storage, shape, Box.full(shape))
    parts = weight.to(_wide(x)).chunk(segments, dim=1)
    each = [
        tree_sum([F.linear(a, b) for a, b in zip(row.chunk(segments, dim=1), parts, strict=True)])
        for row in rows[:, None].to(_wide(x))
    ]
    total = torch.cat(each).view(*x.shape[:-1], shape[0])
    return total if wide else finish_sums.reference(total, bias, x.dtype)


@op
def segment_sums(x: Tensor, weight: Tensor, segments: int) -> Tensor:
    """What ``segments`` of the inputs give by themselves: x [T, K], weight [N, K], both dense.

    Float32 [segments, T, N], each as ``batch_invariant_linear`` sums it before its tree.
    """
    shape = (weight.shape[0], weight.shape[1] // segments)
    run = batch_invariant_linear.reference
    parts = zip(x.chunk(segments, dim=1), weight.chunk(segments, dim=1), strict=True)
    return torch.stack([run(a, b, None, PLAIN, shape, 1, True) for a, b in parts])


@op
def finish_sums(
    sums: Tensor, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """``sums`` [..., N] in float32 and the bias [N], rounded to ``dtype`` as the linear does.

    ``out``: where the result is to lie, dense; by default fresh memory.
    """
    whole = (sums if bias is None else sums + bias.to(sums.dtype)).to(dtype)
    return whole if out is None else out.copy_(whole)


def tree_sum(parts: list[Tensor]) -> Tensor:
    """Neighbours added, then neighbours of the sums, and so on; a power of two of them."""
    assert len(parts) & (len(parts) - 1) == 0, f"{len(parts)} parts make no binary tree"
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def segments_of(inputs: int, *, even: bool) -> int:
    """Into how many segments ``inputs`` are cut: the most that divide them, of an ``even`` length
    where the layout takes them in pairs."""
    step = 2 if even else 1
    return next(n for n in (4, 2, 1) if n == 1 or inputs % (n * step) == 0)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
