"""Qwen3: q and k are normalised per head before the rotation."""

from rollout.models.arch import Arch

Qwen3ForCausalLM = Arch(
    qk_norm=True,
    mlp_bias=False,
    head_dim_given=True,
    slides="late",
    switched=True,
    sliding_window=4096,
)
