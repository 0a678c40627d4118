"""The recurrence of gated delta nets (Yang et al. 2024, "Gated Delta Networks"), token by token."""

import torch
from torch import Tensor

from rollout.kernels.op import op

EPS = 1e-6  # beside the squares of a key or query that is normalised


@op
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    betas: Tensor,
    states: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
) -> Tensor:
    """Of each head, for one token after the other: S decays, learns k -> v, and is read at q.

        S <- exp(gate) S;  S <- S + k (beta (v - S^T k))^T;  out = S^T q

    q, k: [T, KH, DK], normalised here (to length 1, and q times DK^-0.5); v: [T, H, DV], of which
    each H / KH heads in a row share a key head; gates, betas: [T, H] float32; gates may be
    [T, H, DK], one for each row of S (Kimi Team 2025, "Kimi Linear"). Sequences are as
    ``ForwardBatch`` has them. states: [slots, H, DK, DV] float32: row ``slots[s]`` (int32,
    distinct) is sequence s's S before its new tokens, zero where there are none whatever it holds,
    and is left as S after them. Slot -1: S is zero before them, and is not kept. Computed in
    float32; returns [T, H, DV] of v's dtype. The bits do not depend on how a sequence's tokens are
    divided among calls.
    """
    heads, each = v.shape[1], v.shape[1] // k.shape[1]
    assert q.shape == k.shape
    assert heads == each * k.shape[1]
    assert states.shape[1:] == (heads, k.shape[2], v.shape[2])
    assert betas.shape == v.shape[:2]
    assert gates.shape in (betas.shape, (*betas.shape, k.shape[2]))
    out, starts = torch.empty_like(v), query_starts.tolist()
    keys = _normalised(k).repeat_interleave(each, dim=1)  # [T, H, DK]
    queries = _normalised(q).repeat_interleave(each, dim=1) * k.shape[2] ** -0.5
    decays, values = gates.exp()[..., None], _wide(v)
    decays = decays if gates.dim() == 3 else decays[..., None]  # [T, H, DK or 1, 1]
    for s, (slot, length) in enumerate(zip(slots.tolist(), context_lens.tolist(), strict=True)):
        fresh = slot < 0 or length == starts[s + 1] - starts[s]
        state = states.new_zeros(states.shape[1:]) if fresh else states[slot]  # [H, DK, DV]
        for t in range(starts[s], starts[s + 1]):
            key, query = keys[t, :, :, None], queries[t, :, :, None]
            state = state * decays[t]
            delta = (values[t] - (state * key).sum(1)) * betas[t, :, None]
            state = state + key * delta[:, None]
            out[t] = (state * query).sum(1).to(v.dtype)
        if slot >= 0:
            states[slot] = state
    return out


def _normalised(x: Tensor) -> Tensor:
    wide = _wide(x)
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + EPS)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
