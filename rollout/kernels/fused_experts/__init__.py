"""The experts of a mixture, applied to the tokens that were routed to them."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.kernels.fused_experts.lora import ExpertFactors, ExpertsLora
from rollout.kernels.op import op

__all__ = ["ExpertFactors", "ExpertsLora", "by_expert", "fused_experts", "gate"]

Product = Callable[[int, Tensor], Tensor]  # of an expert and its rows


@op
def fused_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    experts: Tensor,
    weights: Tensor,
    first: int = 0,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    clamped: tuple[float, float] | None = None,
    squared: bool = False,
    lora: ExpertsLora | None = None,
) -> Tensor:
    """Sum over a token's experts of ``weight * w2(silu(w1 x) * (w3 x))``; returns [T, H].

    x: [T, H]; w13: [E, 2 I, H] (w1's rows, then w3's) and w2: [E, H, I], in the dtype of x, in any
    strides; experts: [T, k] int64, no expert twice in a row; weights: [T, k], x's dtype or float32.
    ``w13[e]`` is expert ``first + e``: those outside are another rank's and add nothing.
    b13 [E, 2 I], b2 [E, H]: biases. ``clamped``: how the two are multiplied, see ``gate``.
    ``squared``: w13 [E, I, H] has one half alone: ``weight * w2(relu(w1 x)^2)``. ``lora``: what is
    added to both products of an expert, rounded by itself.

    Each projection is rounded to x's dtype; products with ``weights`` have the wider dtype of the
    two, are summed over k in the order of ``experts``, and rounded once (what transformers 5's
    grouped experts do). Rows do not depend on one another, but for the matrix product's own bits.
    """
    assert w13.shape[0] == w2.shape[0], f"{w13.shape} and {w2.shape}: other numbers of experts"
    products = partial(_linear, w13, b13), partial(_linear, w2, b2)
    return by_expert(x, experts, weights, first, len(w13), products, clamped, squared, lora)


def by_expert(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    first: int,
    count: int,
    products: tuple[Product, Product],
    clamped: tuple[float, float] | None,
    squared: bool,
    lora: ExpertsLora | None,
) -> Tensor:
    """``fused_experts`` by the two products of an expert, whatever holds its weights; what is no
    product is done once, for all ``count`` experts together.
    """
    tokens, chosen = experts.shape
    assert weights.shape == experts.shape, f"weights {weights.shape}, experts {experts.shape}"
    pairs = experts.reshape(-1)
    order = pairs.argsort(stable=True)  # (token, expert) pairs, grouped by expert
    bounds = torch.arange(first, first + count + 1, device=x.device)
    starts: list[int] = torch.searchsorted(pairs[order], bounds).tolist()
    out = x.new_zeros((tokens * chosen, x.shape[1]))
    mine = order[starts[0] : starts[-1]]
    held = [e for e in range(count) if starts[e] < starts[e + 1]]
    if held:
        counts = [starts[e + 1] - starts[e] for e in held]
        up, down = products
        of = mine // chosen, pairs[mine] - first
        inputs = torch.split(x[of[0]], counts)
        both = torch.cat([up(e, y) for e, y in zip(held, inputs, strict=True)])
        if lora is not None:
            lora.add(lora.w13, both, lambda: x[of[0]], *of)
        inner = gate(both, clamped, squared)
        parts = torch.split(inner, counts)
        last = torch.cat([down(e, y) for e, y in zip(held, parts, strict=True)])
        if lora is not None:
            lora.add(lora.w2, last, inner, *of)
        out[mine] = last
    weighted = out * weights.reshape(-1, 1)  # [T k, H]
    return weighted.view(tokens, chosen, x.shape[1]).sum(dim=1).to(x.dtype)


def _linear(weights: Tensor, biases: Tensor | None, expert: int, x: Tensor) -> Tensor:
    return F.linear(x, weights[expert], None if biases is None else biases[expert])


def gate(both: Tensor, clamped: tuple[float, float] | None = None, squared: bool = False) -> Tensor:
    """[rows, 2 I] -> [rows, I]: silu(first half) * second half.

    ``clamped`` (alpha, limit): columns alternate between the two. The first is at most ``limit``,
    the second within it; ``first * sigmoid(alpha * first) * (second + 1)``. (gpt-oss)
    ``squared``: relu(both)^2, of as many columns.
    """
    if squared:
        return both.relu().square()
    if clamped is None:
        first, second = both.chunk(2, dim=-1)
        return F.silu(first) * second
    alpha, limit = clamped
    first, second = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    return (second + 1) * (first * torch.sigmoid(first * alpha))
