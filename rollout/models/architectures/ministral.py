"""Ministral: Mistral whose layers are told apart by layer_types; Ministral 3: queries grow."""

from rollout.models.arch import Arch

MinistralForCausalLM = Arch(
    qkv_bias=False, o_bias=False, mlp_bias=False, slides="typed", sliding_window=4096
)
Ministral3ForCausalLM = Arch(
    qkv_bias=False, o_bias=False, mlp_bias=False, slides="always", rope_theta=1e6
)
