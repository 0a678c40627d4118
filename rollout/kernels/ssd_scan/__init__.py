"""The recurrence of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"), token by token."""

import torch
from torch import Tensor

from rollout.kernels.op import op


@op
def ssd_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    steps: Tensor,
    rates: Tensor,
    skips: Tensor,
    states: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
) -> Tensor:
    """Of each head, for one token after the other: S decays, takes up x at b, and is read at c.

        S <- exp(rate * step) S + b (step x)^T;  out = S^T c + skip x

    x: [T, H, P]; b, c: [T, G, N], of which each H / G heads in a row share a group; steps: [T, H],
    rates (below 0) and skips: [H], float32. Sequences are as ``ForwardBatch`` has them. states:
    [slots, H, N, P] float32: row ``slots[s]`` (int32, distinct) is sequence s's S before its new
    tokens, zero where there are none whatever it holds, and is left as S after them. Slot -1: S is
    zero before them, and is not kept. Computed in float32; returns [T, H, P] of x's dtype. The bits
    do not depend on how a sequence's tokens are divided among calls.
    """
    heads, each = x.shape[1], x.shape[1] // b.shape[1]
    assert b.shape == c.shape
    assert heads == each * b.shape[1]
    assert states.shape[1:] == (heads, b.shape[2], x.shape[2])
    assert steps.shape == x.shape[:2]
    assert rates.shape == skips.shape == (heads,)
    out, starts = torch.empty_like(x), query_starts.tolist()
    keys, queries = (_wide(of).repeat_interleave(each, dim=1) for of in (b, c))  # [T, H, N]
    values, decays = _wide(x), (rates * steps).exp()
    for s, (slot, length) in enumerate(zip(slots.tolist(), context_lens.tolist(), strict=True)):
        fresh = slot < 0 or length == starts[s + 1] - starts[s]
        state = states.new_zeros(states.shape[1:]) if fresh else states[slot]  # [H, N, P]
        for t in range(starts[s], starts[s + 1]):
            taken = keys[t, :, :, None] * (values[t] * steps[t, :, None])[:, None]
            state = state * decays[t, :, None, None] + taken
            read = (state * queries[t, :, :, None]).sum(1) + values[t] * skips[:, None]
            out[t] = read.to(x.dtype)
        if slot >= 0:
            states[slot] = state
    return out


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
