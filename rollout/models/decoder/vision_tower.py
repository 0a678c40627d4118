"""transformers' own encoder of what is seen, as a part of a model of ours: whole on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rollout.models.config.vision import VisionConfig
from rollout.models.layers.base import Build, whole_slot
from rollout.models.transformers_backend.construct import unfilled
from rollout.models.weight_io.table import ParamSpec
from rollout.weights import PLAIN, WeightSlot


class VisionTower(nn.Module):
    """Patches of an image, or of frames, to features of parts; its parameters come through slots.

    No rank needs another for it: all have the same weights, read the same patches and get the same
    bits.
    """

    def __init__(self, build: Build, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.inner = _construct(config, build.dtype, build.device)
        self.specs = {
            f"inner.{name}": ParamSpec(tuple(parameter.shape), PLAIN)
            for name, parameter in self.inner.named_parameters()
        }

    def forward(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """[patches, patch_values] of one visual of ``grid`` (time, rows, columns) patches ->
        [parts, 1 + levels, hidden], in the order of its placeholders.
        """
        out: Any = self.inner(pixels, grid_thw=torch.tensor([grid], device=pixels.device))
        levels = getattr(out, "deepstack_features", None) or []
        return torch.stack((out.pooler_output, *levels), dim=1)

    def slots(self, prefix: str) -> list[WeightSlot]:
        """Files have the names of the module."""
        return [
            whole_slot(f"{prefix}{name.removeprefix('inner')}", spec.shape, f"{prefix}.{name}")
            for name, spec in self.specs.items()
        ]


def _construct(config: VisionConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """With parameters that nobody has filled; what is computed of the config is there."""
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[config.tower["model_type"]]
    with unfilled(device):
        tower: nn.Module = AutoModel.from_config(kind.from_dict(dict(config.tower)), dtype=dtype)
    for parameter in tower.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    return tower.eval()
