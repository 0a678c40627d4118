"""DeepSeek-V2: latent attention; a token's experts are chosen by softmax, and never normalised."""

from rollout.models.arch import Arch, LatentArch, MoEArch, SharedArch

MOE = MoEArch(
    count="n_routed_experts",
    shared=SharedArch(
        size="moe_intermediate_size", count="n_shared_experts", name="shared_experts", gated=False
    ),
    every_layer=True,
    first_dense="first_k_dense_replace",
    groups="max",
    norm_topk_prob=False,
    scaled=True,
    wide_router=True,
    wide_weights=True,
)
DeepseekV2ForCausalLM = Arch(latent=LatentArch(), moe=MOE)
