"""GLM-4.5 and 4.6: a part of each head turns; sigmoid scores, a bias on the choice of experts."""

from rollout.models.arch import Arch, MoEArch, SharedArch

Glm4MoeForCausalLM = Arch(
    o_bias=False,
    mlp_bias=False,
    qk_norm=("use_qk_norm", False),
    partial_rotary=0.5,
    next_layers="num_nextn_predict_layers",
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
