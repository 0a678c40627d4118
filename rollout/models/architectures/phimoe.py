"""Phi-MoE: norms with a mean and a bias; two experts, each weighed among those near to it."""

from rollout.models.arch import Arch, MoEArch
from rollout.weights.expert_names import W123_NAMES

PhimoeForCausalLM = Arch(
    norm="layer",
    norm_bias=True,
    head_bias=("lm_head_bias", False),
    rope_theta=1e6,
    slides="always",
    moe=MoEArch(
        names=W123_NAMES,
        count="num_local_experts",
        size="intermediate_size",
        norm_topk_prob=False,
        every_layer=True,
        scores="mixer",
    ),
)
