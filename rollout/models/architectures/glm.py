"""GLM-4: half of each head turns, by neighbours; GLM-4-0414 has norms after each half, too."""

from dataclasses import replace

from rollout.models.arch import Arch, BlockNorms

GlmForCausalLM = Arch(
    qkv_bias=("attention_bias", True),
    o_bias=False,
    mlp_bias=False,
    fused_gate_up=True,
    interleaved=True,
    partial_rotary=0.5,
)
Glm4ForCausalLM = replace(
    GlmForCausalLM,
    norms=BlockNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
)
