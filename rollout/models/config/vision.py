"""What a multimodal checkpoint's ``config.json`` says about its images and videos."""

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
    ``merge`` patches of ``patch_values`` values each, of ``frames`` frames. ``levels``: how many of
    the tower's blocks give features of their own. ``video_token``: as ``image_token``, of a video;
    None: the model is shown none. ``frame_ends``: the ids around the frames of one time, where a
    video lies in the prompt time by time; else it lies there whole, and positions rise by
    ``second`` in a second.
    """

    tower: Mapping[str, Any]
    hidden_size: int
    image_token: int
    video_token: int | None
    frame_ends: tuple[int, int] | None
    second: float
    frames: int
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
    placed = _video_ids(whole, read.count("vocab_size"))
    return VisionConfig(
        tower=tower,
        hidden_size=hidden,
        image_token=token,
        video_token=placed and placed[0],
        frame_ends=(placed[1], placed[2]) if placed and arch.pace is None else None,
        second=float(tower[arch.pace]) if arch.pace else 0.0,
        frames=frames,
        merge=inner.count("spatial_merge_size"),
        patch_values=inner.count("in_channels") * frames * size * size,
        levels=levels,
    )


def _video_ids(whole: Mapping[str, Any], vocab_size: int) -> tuple[int, int, int] | None:
    """Of a part of a video, and before and after one; None where the vocabulary has not all."""
    names = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
    found = [token for name in names if type(token := whole.get(name)) is int]
    if len(found) < 3 or not all(0 <= token < vocab_size for token in found):
        return None
    return found[0], found[1], found[2]
