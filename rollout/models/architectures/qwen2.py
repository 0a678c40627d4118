"""Qwen2: biases on q, k and v alone."""

from rollout.models.arch import Arch

Qwen2ForCausalLM = Arch(
    qkv_bias=True, o_bias=False, mlp_bias=False, slides="late", switched=True, sliding_window=4096
)
