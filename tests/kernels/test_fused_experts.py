"""The grouped expert op against each token on its own, and against transformers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from kernels.backends import backends
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from rollout.kernels import fused_experts
from rollout.kernels.fused_experts import ExpertFactors, ExpertsLora

EXPERTS, CHOSEN, HIDDEN, INNER = 7, 3, 32, 24


def _inputs(tokens: int = 31, dtype: torch.dtype = torch.float32):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, HIDDEN, generator=rng).to(dtype)
    w13 = (torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=rng) / HIDDEN**0.5).to(dtype)
    w2 = (torch.randn(EXPERTS, HIDDEN, INNER, generator=rng) / INNER**0.5).to(dtype)
    scores, picks = torch.rand(tokens, EXPERTS, generator=rng).topk(CHOSEN)
    return x, w13, w2, picks, scores.to(dtype)


def test_each_token_gets_the_sum_of_its_own_experts() -> None:
    x, w13, w2, picks, weights = _inputs()
    out = fused_experts(x, w13, w2, picks, weights)
    for t in range(len(x)):
        wanted = torch.zeros(HIDDEN)
        for e, weight in zip(picks[t].tolist(), weights[t], strict=True):
            inner = F.silu(w13[e, :INNER] @ x[t]) * (w13[e, INNER:] @ x[t])
            wanted += weight * (w2[e] @ inner)
        torch.testing.assert_close(out[t], wanted, rtol=1e-5, atol=1e-5)


def test_the_ranks_of_a_split_add_up_to_the_whole() -> None:
    x, w13, w2, picks, weights = _inputs()
    whole = fused_experts(x, w13, w2, picks, weights)
    for cuts in ((0, 4, 7), (0, 2, 4, 7)):
        parts = [fused_experts(x, w13[a:b], w2[a:b], picks, weights, a) for a, b in pairwise(cuts)]
        torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)


def test_bfloat16_rounds_where_transformers_does() -> None:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_hidden_layers=1
    )
    config._experts_implementation = "grouped_mm"
    theirs = Qwen3MoeExperts(config).bfloat16()
    x, w13, w2, picks, weights = _inputs(dtype=torch.bfloat16)
    with torch.no_grad():
        theirs.gate_up_proj.copy_(w13)
        theirs.down_proj.copy_(w2)
        wanted = theirs(x, picks, weights)
    assert torch.equal(fused_experts(x, w13, w2, picks, weights), wanted)


def test_no_token_and_no_expert_here_give_zeros() -> None:
    x, w13, w2, picks, weights = _inputs()
    none = fused_experts(x[:0], w13, w2, picks[:0], weights[:0])
    assert none.shape == (0, HIDDEN)
    elsewhere = fused_experts(x, w13, w2, picks, weights, EXPERTS)
    assert elsewhere.shape == x.shape
    assert not elsewhere.any()


def test_float32_weights_are_not_rounded_before_the_sum() -> None:
    x, w13, w2, picks, weights = _inputs(dtype=torch.bfloat16)
    wide = torch.rand(weights.shape, generator=torch.Generator().manual_seed(1))
    out = fused_experts(x, w13, w2, picks, wide)
    assert out.dtype == torch.bfloat16
    alone = [
        fused_experts(x, w13, w2, picks[:, k : k + 1], torch.ones_like(wide[:, :1])).float()
        for k in range(CHOSEN)
    ]
    wanted = sum(part * wide[:, k : k + 1] for k, part in enumerate(alone)).bfloat16()
    torch.testing.assert_close(out, wanted, rtol=2**-8, atol=0)


@pytest.mark.parametrize("first", [0, 2])
def test_every_token_has_its_own_adapter_at_each_of_its_experts(first: int) -> None:
    torch.manual_seed(0)
    tokens, experts, chosen, hidden, inner, slots, rank = 37, 5, 2, 20, 12, 3, 2
    x = torch.randn(tokens, hidden)
    w13 = torch.randn(experts, 2 * inner, hidden) / hidden**0.5
    w2 = torch.randn(experts, hidden, inner) / inner**0.5
    weights, picks = torch.randn(tokens, experts).softmax(-1).topk(chosen)
    factors = []
    for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
        a = torch.randn(slots, experts, rank, inputs) / inputs**0.5
        scales = torch.tensor([[0.7], [0.0 if outputs == hidden else 1.0], [1.3]])
        factors.append(ExpertFactors(a, torch.randn(slots, experts, rank, outputs), scales))
    slot_of = torch.arange(tokens) % (slots + 1) - 1
    wanted = torch.empty_like(x)
    for token, slot in enumerate(slot_of.tolist()):
        own = [w13, w2]
        if slot >= 0:
            own = [
                w + f.scales[slot] * f.b[slot].mT @ f.a[slot]
                for w, f in zip(own, factors, strict=True)
            ]
        row = slice(token, token + 1)
        here = [w[first:] for w in own]
        wanted[row] = fused_experts.reference(x[row], *here, picks[row], weights[row], first)
    here = [
        ExpertFactors(f.a[:, first:].clone(), f.b[:, first:].clone(), f.scales) for f in factors
    ]
    lora = ExpertsLora(*here, slot_of)
    for name, run in backends(fused_experts).items():
        got = run(x, w13[first:], w2[first:], picks, weights, first, lora=lora)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, msg=name)
    # Those of a few experts that were taken out, of which the second is the last here.
    held = torch.tensor([0, experts - first - 1])
    moved = torch.full_like(picks, -1)
    for place, expert in enumerate(held.tolist()):
        moved[picks == expert + first] = place
    few = [w[first:][held] for w in (w13, w2)]
    kept = [w[first:].clone() for w in (w13, w2)]
    for w in kept:
        w[1:-1] = 0
    others = [ExpertFactors(f.a.clone(), f.b.clone(), f.scales) for f in here]
    for f in others:
        f.b[:, 1:-1] = 0
    wanted = fused_experts(x, *kept, picks, weights, first, lora=ExpertsLora(*others, slot_of))
    got = fused_experts(x, *few, moved, weights, lora=lora.among(held))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
