"""Nemotron-H: each layer is Mamba-2, attention without positions, an MLP or experts alone."""

from rollout.models.arch import Arch, MambaArch, MoEArch, SharedArch

NemotronHForCausalLM = Arch(
    lone=True,
    squared=True,
    activation=("mlp_hidden_act", "relu2"),
    head_dim_given=True,
    qkv_bias=False,
    o_bias=False,
    norm="rms wide",
    norm_eps="layer_norm_epsilon",
    no_rope="all",
    fields={"head_dim": "attention_head_dim"},  # as the first releases have it
    embedding="embeddings",
    last_norm="norm_f",
    prefixes={"backbone.": "model.", "mtp.": ""},
    mamba=MambaArch(
        heads="mamba_num_heads",
        dim="mamba_head_dim",
        groups="n_groups",
        state="ssm_state_size",
        width="conv_kernel",
        conv_bias=("use_conv_bias", True),
        bias=("use_bias", False),
        least_step="time_step_min",
    ),
    moe=MoEArch(
        count="n_routed_experts",
        shared=SharedArch(
            size="moe_shared_expert_intermediate_size", name="shared_experts", gated=False
        ),
        every_layer=True,
        narrow="moe_latent_size",
        scores="sigmoid",
        score_bias="gate",
        groups="top2",
        scaled=True,
        wide_router=True,
        wide_weights=True,
    ),
)
