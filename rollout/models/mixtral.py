"""Mixtral: Llama's attention; all layers sparse, under the file's names for them."""

from __future__ import annotations

from rollout.models.blocks import DecoderBlock
from rollout.models.causal_lm import CausalLM
from rollout.models.layers.base import Build
from rollout.models.moe import SparseMoE


class MixtralForCausalLM(CausalLM):
    """The Mixtral decoder: ``w1`` is the gate, ``w3`` goes up, ``w2`` down."""

    def make_block(self, build: Build, index: int) -> DecoderBlock:
        return DecoderBlock(build, SparseMoE(build, ("w1", "w3", "w2")), "block_sparse_moe")
