"""Qwen2-MoE: Qwen2's attention; every token also passes a shared expert behind a sigmoid gate."""

from __future__ import annotations

from rollout.models.blocks import DecoderBlock
from rollout.models.causal_lm import CausalLM
from rollout.models.layers.base import Build
from rollout.models.moe import SparseBlock


class Qwen2MoeForCausalLM(CausalLM):
    """The Qwen2-MoE decoder; which layers are sparse is read in ``MoEConfig``."""

    def make_block(self, build: Build, index: int) -> DecoderBlock:
        return SparseBlock(build, index)
