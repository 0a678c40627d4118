"""Llama: biases by config, no normalisation of q and k."""

from __future__ import annotations

from rollout.models.blocks import DecoderBlock
from rollout.models.causal_lm import CausalLM
from rollout.models.layers.base import Build


class LlamaForCausalLM(CausalLM):
    """The Llama decoder; what sets it apart from its kin is read in ``ModelConfig``."""

    def make_block(self, build: Build, index: int) -> DecoderBlock:
        return DecoderBlock(build)
