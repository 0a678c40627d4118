"""Qwen3: q and k are normalised per head before the rotation."""

from __future__ import annotations

from rollout.models.blocks import DecoderBlock
from rollout.models.causal_lm import CausalLM
from rollout.models.layers.base import Build


class Qwen3ForCausalLM(CausalLM):
    """The Qwen3 decoder; what sets it apart from its kin is read in ``ModelConfig``."""

    def make_block(self, build: Build, index: int) -> DecoderBlock:
        return DecoderBlock(build)
