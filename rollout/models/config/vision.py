"""What a multimodal checkpoint's ``config.json`` says about its images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import ConfigError
from rollout.models.arch import VisionArch
from rollout.models.config.reader import Reader
from rollout.models.config.text import parsed_config


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """``tower``: the plain config of transformers' module, ``hidden_size`` wide where it ends.

    ``image_token``: the id that stands for a part of an image in a prompt; a part is ``merge`` by
    ``merge`` patches of ``patch_values`` values each. ``levels``: how many of the tower's blocks
    give features of their own.
    """

    tower: Mapping[str, Any]
    hidden_size: int
    image_token: int
    merge: int
    patch_values: int
    levels: int

    @property
    def features(self) -> int:
        """Numbers that the tower makes of one part."""
        return (1 + self.levels) * self.hidden_size


def read_vision(values: Mapping[str, Any], arch: VisionArch, read: Reader) -> VisionConfig:
    """From the whole ``values``; ``read`` reads those of the text model. Raises ``ConfigError``."""
    whole = parsed_config(values, arch.kind, read.file)
    tower, hidden = whole["vision_config"], read.count("hidden_size")
    inner = Reader(tower, f"{read.file}: vision_config")
    if inner.count("out_hidden_size") != hidden:
        raise ConfigError(
            f"{inner.file}.out_hidden_size {tower['out_hidden_size']} must be the text model's "
            f"hidden_size {hidden}"
        )
    for name in ("patch_size", "temporal_patch_size"):
        inner.count(name)
    token = Reader(whole, read.file).count("image_token_id", least=0)
    if token >= read.count("vocab_size"):
        raise ConfigError(f"{read.file}: image_token_id {token} is outside the vocabulary")
    size, frames = tower["patch_size"], tower["temporal_patch_size"]
    levels = len(tower[arch.levels]) if arch.levels else 0
    if levels > read.count("num_hidden_layers"):
        raise ConfigError(
            f"{inner.file}.{arch.levels} has {levels} levels, the text model has fewer blocks"
        )
    return VisionConfig(
        tower=tower,
        hidden_size=hidden,
        image_token=token,
        merge=inner.count("spatial_merge_size"),
        patch_values=inner.count("in_channels") * frames * size * size,
        levels=levels,
    )
