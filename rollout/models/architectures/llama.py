"""Llama: biases by config, no normalisation of q and k."""

from rollout.models.arch import Arch

LlamaForCausalLM = Arch()
