"""Bamba: Mamba-2 with a layer of attention now and then, of whose heads a half turns."""

from rollout.models.arch import Arch, BlockNorms, MambaArch

BambaForCausalLM = Arch(
    mlp="feed_forward",
    norms=BlockNorms(before_mlp="pre_ff_layernorm"),
    partial_rotary=0.5,
    mamba=MambaArch(),
    last_norm="final_layernorm",
)
