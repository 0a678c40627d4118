"""Kimi-Linear: states that decay row by row, latent attention without positions, experts."""

from dataclasses import replace

from rollout.models.arch import Arch, DeltaArch, LatentArch
from rollout.models.architectures.deepseek_v3 import MOE
from rollout.weights.expert_names import W123_NAMES

KimiLinearForCausalLM = Arch(
    mlp="block_sparse_moe",  # of dense layers, too, as transformers writes them
    mlp_bias=False,
    no_rope="all",
    next_layers="num_nextn_predict_layers",
    delta=DeltaArch(name="self_attn", apart=True, by_row=True),
    latent=LatentArch(interleaved=False),
    moe=replace(MOE, names=W123_NAMES),
    fields={
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    },
)
