"""Mistral: Llama without biases, whose attention may reach back a window alone."""

from rollout.models.arch import Arch

MistralForCausalLM = Arch(
    qkv_bias=False, o_bias=False, mlp_bias=False, slides="always", sliding_window=4096
)
