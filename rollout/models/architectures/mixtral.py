"""Mixtral: Llama's attention without biases; all layers sparse, under the file's names for them."""

from rollout.models.arch import Arch, MoEArch
from rollout.weights.expert_names import W123_NAMES

MixtralForCausalLM = Arch(
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    rope_theta=1e6,
    slides="always",
    moe=MoEArch(
        names=W123_NAMES,
        count="num_local_experts",
        size="intermediate_size",
        norm_topk_prob=True,
        every_layer=True,
        wide_weights=True,
    ),
)
