"""The experts of a mixture, applied to the tokens that were routed to them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.kernels.op import op


@op
def fused_experts(
    x: Tensor, w13: Tensor, w2: Tensor, experts: Tensor, weights: Tensor, first: int = 0
) -> Tensor:
    """Sum over a token's experts of ``weight * w2(silu(w1 x) * (w3 x))``; returns [T, H].

    x: [T, H]; w13: [E, 2 I, H] (w1's rows, then w3's) and w2: [E, H, I], in the dtype of x;
    experts: [T, k] int64, no expert twice in a row; weights: [T, k], x's dtype or float32.
    ``w13[e]`` is expert ``first + e``: those outside are another rank's and add nothing.

    Each projection is rounded to x's dtype; products with ``weights`` have the wider dtype of the
    two, are summed over k in the order of ``experts``, and rounded once (what transformers 5's
    grouped experts do). Rows do not depend on one another, but for the matrix product's own bits.
    """
    tokens, chosen = experts.shape
    assert w13.shape[0] == w2.shape[0], f"{w13.shape} and {w2.shape}: other numbers of experts"
    assert weights.shape == experts.shape, f"weights {weights.shape}, experts {experts.shape}"
    pairs = experts.reshape(-1)
    order = pairs.argsort(stable=True)  # (token, expert) pairs, grouped by expert
    bounds = torch.arange(first, first + len(w13) + 1, device=x.device)
    starts: list[int] = torch.searchsorted(pairs[order], bounds).tolist()
    out = x.new_zeros((tokens * chosen, x.shape[1]))
    for e in range(len(w13)):
        if starts[e] == starts[e + 1]:
            continue
        rows = order[starts[e] : starts[e + 1]]
        gate, up = F.linear(x[rows // chosen], w13[e]).chunk(2, dim=-1)
        out[rows] = F.linear(F.silu(gate) * up, w2[e])
    weighted = out * weights.reshape(-1, 1)  # [T k, H]
    return weighted.view(tokens, chosen, x.shape[1]).sum(dim=1).to(x.dtype)
