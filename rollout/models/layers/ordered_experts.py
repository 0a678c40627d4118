"""A mixture whose sums have one order, whatever the batch and the number of ranks are.

A token's sum is cut into *lanes*, as many whatever the number of ranks is, which divides it: in
each its experts are added in the order of their numbers, in float32; lanes are added in a binary
tree, of which a rank has a branch, and the result is rounded once. A lane has a segment of every
expert's inner size; or, of ranks that hold whole experts, an equal run of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels import batch_invariant_linear, segment_sums, silu_mul
from rollout.kernels.batch_invariant_linear import SEGMENTS, segments_of
from rollout.kernels.fused_experts import ExpertsLora
from rollout.models.config.moe import MoEConfig
from rollout.models.layers.activations import sigmoid
from rollout.models.layers.base import Build
from rollout.weights import PLAIN


def lanes_of(build: Build) -> int:
    """How many lanes all ranks have together: 1, 2 or 4."""
    moe = build.config.moe
    assert moe is not None, "lanes are of mixtures"
    lanes = SEGMENTS if build.expert_parallel else segments_of(moe.expert_size, even=False)
    if moe.arch.shared is not None:  # its inner size is cut, too
        lanes = min(lanes, segments_of(moe.shared_size, even=False))
    return lanes


def ordered_experts(
    build: Build,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    experts: Tensor,
    weights: Tensor,
    first: int,
    biases: tuple[Tensor | None, Tensor | None],
    lora: ExpertsLora | None = None,
) -> Tensor:
    """This rank's lanes, float32 [lanes here, T, hidden]; arguments as of ``fused_experts``."""
    moe, lanes = build.config.moe, lanes_of(build)
    assert moe is not None
    whole = build.expert_parallel
    here = lanes // build.tp.size
    out = x.new_zeros((here, *x.shape), dtype=torch.float32)
    for expert in range(first, first + len(w13)):
        rows, places = (experts == expert).nonzero(as_tuple=True)
        if not len(rows):
            continue
        scale = weights[rows, places, None]
        taken = x[rows]
        if moe.arch.scaled_inputs:
            taken, scale = taken * scale.to(x.dtype), torch.ones_like(scale)
        b13, b2 = (None if bias is None else bias[expert - first] for bias in biases)
        weight = w13[expert - first].contiguous()
        both = batch_invariant_linear(taken, weight, b13, PLAIN, (weight.shape[0], weight.shape[1]))
        of = rows, torch.full_like(rows, expert - first)
        if lora is not None:
            lora.add(lora.w13, both, taken, *of)
        gated = _gate(both, moe, build.config.arch.squared)
        sums = segment_sums(gated, w2[expert - first].contiguous(), 1 if whole else here)
        if lora is not None:  # of ranks' parts of the inputs: how many they are does count
            added = torch.zeros_like(sums[0], dtype=x.dtype)
            lora.add(lora.w2, added, gated, *of)
            sums[0] += added
        if b2 is not None:
            sums[0] += b2.float()
        sums *= scale.float()
        if whole:
            lane = _lane(expert, moe.num_experts, lanes) - build.tp.rank * here
            out[lane, rows] += sums[0]
        else:
            out[:, rows] += sums
    return out


def _lane(expert: int, count: int, lanes: int) -> int:
    """Of which lane an expert is, whole: ranks hold runs of them that lanes do not straddle."""
    return next(lane for lane in range(lanes) if expert < count * (lane + 1) // lanes)


def _gate(both: Tensor, moe: MoEConfig, squared: bool) -> Tensor:
    """As ``fused_experts.gate``."""
    if squared:
        return both.relu().square()
    if moe.clamped is None:
        return silu_mul(both)
    alpha, limit = moe.clamped
    first, second = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    return (second + 1) * (first * sigmoid(first * alpha))
