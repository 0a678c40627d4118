"""DeepSeek-V3, R1, Kimi-K2, Moonlight, GLM-4.7-Flash: latent attention, experts within groups."""

from rollout.models.arch import Arch, LatentArch, MoEArch, SharedArch

DeepseekV3ForCausalLM = Arch(
    mlp_bias=False,
    next_layers="num_nextn_predict_layers",
    latent=LatentArch(interleaved=("rope_interleave", True)),
    moe=MoEArch(
        count="n_routed_experts",
        shared=SharedArch(
            size="moe_intermediate_size",
            count="n_shared_experts",
            name="shared_experts",
            gated=False,
        ),
        every_layer=True,
        first_dense="first_k_dense_replace",
        scores="sigmoid",
        score_bias="gate",
        groups="top2",
        scaled=True,
        wide_router=True,
        wide_weights=True,
    ),
)
Glm4MoeLiteForCausalLM = DeepseekV3ForCausalLM
