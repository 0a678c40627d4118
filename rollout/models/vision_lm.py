"""A decoder that sees images and videos: ``CausalLM`` with the tower that encodes them."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.models.causal_lm import CausalLM
from rollout.models.decoder.absent import of_first_stage
from rollout.models.decoder.vision_tower import VisionTower
from rollout.models.layers.base import Build


class VisionCausalLM(CausalLM):
    """What is seen comes into a forward pass as ``ForwardBatch.visual``: features. ``visual`` makes
    them, in a call of its own, so that they can be kept.
    """

    def make_parts(self, build: Build) -> None:
        vision = build.config.vision
        assert vision is not None
        self.visual = of_first_stage(build, lambda own: VisionTower(own, vision))

    @torch.no_grad()
    def encode_visual(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """[parts, 1 + levels, hidden] of one visual; see ``VisionTower``. No rank waits in it."""
        features: Tensor = self.visual(pixels.to(self.build.dtype), grid)
        return features
