"""Qwen3-Next: three gated delta nets to one layer of gated attention, and experts."""

from rollout.models.arch import Arch, DeltaArch, MoEArch, SharedArch

Qwen3NextForCausalLM = Arch(
    norm="rms plus one",
    qk_norm=True,
    mlp_bias=False,
    head_dim_given=True,
    partial_rotary=0.25,
    gated=True,
    prefixes={"mtp.": ""},
    delta=DeltaArch(fused=True),
    moe=MoEArch(shared=SharedArch(size="shared_expert_intermediate_size")),
)
