"""Phi-3 and Phi-4: q, k, v and gate, up are one tensor each; a part of a head may turn."""

from rollout.models.arch import Arch

Phi3ForCausalLM = Arch(
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    fused_qkv=True,
    fused_gate_up=True,
    partial_rotary=1.0,
    slides="always",
    longrope=4096,
)
