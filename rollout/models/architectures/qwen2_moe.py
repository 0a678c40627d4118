"""Qwen2-MoE: every token also passes a shared expert, behind a sigmoid gate."""

from rollout.models.arch import Arch, MoEArch, SharedArch

Qwen2MoeForCausalLM = Arch(
    qkv_bias=("qkv_bias", True),
    o_bias=False,
    mlp_bias=False,
    slides="early",
    switched=True,
    sliding_window=4096,
    moe=MoEArch(shared=SharedArch(size="shared_expert_intermediate_size")),
)
