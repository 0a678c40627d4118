"""Falcon-H1: attention and Mamba-2 side by side in each layer, and factors on nearly everything."""

from rollout.models.arch import Arch, BlockNorms, MambaArch, Scale

FalconH1ForCausalLM = Arch(
    mlp="feed_forward",
    norms=BlockNorms(before_mlp="pre_ff_layernorm"),
    last_norm="final_layernorm",
    embedding_scale=Scale("embedding_multiplier", 1.0),
    key_scale=Scale("key_multiplier", 1.0),
    attention_ends=("attention_in_multiplier", "attention_out_multiplier"),
    mlp_scales="mlp_multipliers",
    logits_scale=Scale("lm_head_multiplier", 1.0),
    mamba=MambaArch(
        beside=True,
        inner="mamba_d_ssm",
        out_bias=("projectors_bias", False),
        normed=("mamba_rms_norm", False),
        norm_first=("mamba_norm_before_gate", True),
        scales=("ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers"),
    ),
)
