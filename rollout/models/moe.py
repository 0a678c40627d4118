"""The mixture-of-experts feed-forward that the sparse architectures share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rollout.models.blocks import GatedMLP
from rollout.models.layers.base import Build
from rollout.models.layers.experts import Experts
from rollout.models.layers.linear import ReplicatedLinear
from rollout.models.moe_config import MoEConfig


class SparseMoE(nn.Module):
    """Each token through its likeliest experts, and through the shared one where there is one.

    [T, hidden] -> [T, hidden]; one all-reduce, of both together.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        config, moe = build.config, build.config.moe
        assert moe is not None, f"{config.architecture} needs the configuration of its experts"
        self.tp, self.moe = build.tp, moe
        self.gate = ReplicatedLinear(build, config.hidden_size, moe.num_experts)
        self.experts = Experts(build)
        self.shared_expert: GatedMLP | None = None
        self.shared_expert_gate: ReplicatedLinear | None = None
        if moe.shared_size:
            self.shared_expert = GatedMLP(build, moe.shared_size, reduce=False)
            self.shared_expert_gate = ReplicatedLinear(build, config.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        chosen, weights = route(self.gate(x), self.moe)
        out: Tensor = self.experts(x, chosen, weights)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return self.tp.all_reduce(out)


def route(logits: Tensor, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    """The likeliest experts of each token and their weights, both [T, experts per token].

    logits: [T, experts]. Softmax in float32 over all experts, then the choice, then (where the
    config says so) the chosen weights are made to sum to one, then rounded to the logits' dtype:
    the order of transformers. On every rank the same, as the logits are.
    """
    likely, chosen = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(
        moe.experts_per_token, dim=-1
    )
    if moe.norm_topk_prob:
        likely = likely / likely.sum(dim=-1, keepdim=True)
    return chosen, likely if moe.wide_weights else likely.to(logits.dtype)
