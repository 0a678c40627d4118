"""Qwen3-MoE: Qwen3's attention over experts; no shared one."""

from rollout.models.arch import Arch, MoEArch

Qwen3MoeForCausalLM = Arch(
    qk_norm=True, mlp_bias=False, slides="always", switched=True, sliding_window=4096, moe=MoEArch()
)
