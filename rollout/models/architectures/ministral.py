"""Ministral: Mistral whose layers are told apart by layer_types; Ministral 3: queries grow."""

from dataclasses import replace

from rollout.models.arch import Arch
from rollout.models.architectures.mistral import MistralForCausalLM

MinistralForCausalLM = Arch(
    qkv_bias=False, o_bias=False, mlp_bias=False, slides="typed", sliding_window=4096
)
Ministral3ForCausalLM = Arch(
    qkv_bias=False, o_bias=False, mlp_bias=False, slides="always", rope_told=True
)
Mistral3ForConditionalGeneration = replace(
    MistralForCausalLM,
    texts={"mistral": MistralForCausalLM, "ministral3": Ministral3ForCausalLM},
)
