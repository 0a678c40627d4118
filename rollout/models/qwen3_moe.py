"""Qwen3-MoE: Qwen3's attention over sparse layers; no shared expert."""

from __future__ import annotations

from rollout.models.blocks import DecoderBlock
from rollout.models.causal_lm import CausalLM
from rollout.models.layers.base import Build
from rollout.models.moe import SparseBlock


class Qwen3MoeForCausalLM(CausalLM):
    """The Qwen3-MoE decoder; which layers are sparse is read in ``MoEConfig``."""

    def make_block(self, build: Build, index: int) -> DecoderBlock:
        return SparseBlock(build, index)
