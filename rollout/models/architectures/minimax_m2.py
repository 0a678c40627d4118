"""MiniMax-M2: q and k normalised as whole rows; sigmoid scores, a bias on the choice of experts."""

from rollout.models.arch import Arch, MoEArch
from rollout.weights.expert_names import W123_NAMES

MiniMaxM2ForCausalLM = Arch(
    qkv_bias=False,
    o_bias=False,
    qk_norm=True,
    qk_norm_over="row",
    rope_theta=5e6,
    partial_rotary=1.0,
    moe=MoEArch(
        names=W123_NAMES,
        count="num_local_experts",
        size="intermediate_size",
        every_layer=True,
        scores="sigmoid",
        score_bias="block",
        norm_topk_prob=True,
        wide_weights=True,
    ),
)
