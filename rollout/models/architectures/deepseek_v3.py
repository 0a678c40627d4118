"""DeepSeek-V3, R1, Kimi-K2, Moonlight, GLM-4.7-Flash: latent attention, experts within groups."""

from dataclasses import replace

from rollout.models.arch import Arch, LatentArch
from rollout.models.architectures.deepseek_v2 import MOE as DEEPSEEK_V2_MOE

MOE = replace(
    DEEPSEEK_V2_MOE, scores="sigmoid", score_bias="gate", groups="top2", norm_topk_prob=None
)
DeepseekV3ForCausalLM = Arch(
    mlp_bias=False,
    next_layers="num_nextn_predict_layers",
    latent=LatentArch(interleaved=("rope_interleave", True)),
    moe=MOE,
)
Glm4MoeLiteForCausalLM = DeepseekV3ForCausalLM
