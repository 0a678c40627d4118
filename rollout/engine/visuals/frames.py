"""Frames of a video to patches, bit for bit as transformers' video processors make them.

Those need torchvision, whose resizing of bytes is torch's own: here torch does it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.engine.visuals.frame_sampling import FrameSampling
from rollout.engine.visuals.limits import VisualLimits
from rollout.engine.visuals.reader import decoded, open_image, upright_size
from rollout.engine.visuals.video_files import VideoFileReader
from rollout.errors import ConfigError, InvalidRequest
from rollout.generation import PatchedVisual, Video, VideoFile
from rollout.models.config.reader import read_json
from rollout.models.config.vision import VisionConfig

_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")  # the first that is there
_NESTED = "processor_config.json"  # which goes before them where it has a "video_processor"
_BICUBIC = 3  # of Pillow's resampling
_HALF, _CLIP = (0.5,) * 3, (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRules:
    """What a checkpoint's files say of its videos, with transformers' defaults.

    ``least`` and ``most``: pixels after resizing, of all frames together where the model writes
    times between them (``together``), else of each. ``cap``: tokens of a frame, or of a whole
    video, that bound ``most`` further; None: they do not.
    """

    together: bool
    least: int
    most: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float
    cap: int | None
    sampling: FrameSampling  # of files

    @classmethod
    def read(cls, directory: str, config: VisionConfig) -> FrameRules:
        """Raises ``ConfigError`` for what is not done here."""
        name, values = _of_files(Path(directory))
        together = config.frame_ends is not None
        side = 32 if together else 28
        size = {"shortest_edge": 128 * side**2, "longest_edge": 768 * side**2}
        if isinstance(said := values.get("size"), Mapping):
            size |= said
        if not together:  # the older names
            for key, older in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
                size[key] = values.get(older) or size[key]
        asked = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": _BICUBIC}
        asked |= {
            "patch_size": config.tower["patch_size"],
            "merge_size": config.merge,
            "temporal_patch_size": config.frames,
        }
        for key, wanted in asked.items():
            if values.get(key, wanted) != wanted:
                raise ConfigError(f"{name} says {key} {values[key]!r}, only {wanted} is served")
        cap = values.get("max_video_tokens", 768 if together else 128_000)
        return cls(
            together=together,
            least=size["shortest_edge"],
            most=size["longest_edge"],
            mean=tuple(values.get("image_mean") or (_HALF if together else _CLIP)),
            std=tuple(values.get("image_std") or (_HALF if together else _CLIP_STD)),
            scale=values.get("rescale_factor") or 1 / 255,
            cap=cap if values.get("cap_pixels_per_frame") else None,
            sampling=FrameSampling.read(values, None if together else config.frames),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedVideo:
    """A video whose frames are of one size, which is known, and not decoded yet.

    ``size``: rows and columns of pixels after resizing; ``grid``: patches along time, rows
    and columns; ``times`` and ``rate`` of its frames as in ``Video``; ``content``: bytes that
    tell it from others; ``read``: its frames as RGB images or arrays, one after the other.
    """

    name: str
    times: tuple[float, ...]
    rate: float
    content: tuple[bytes, ...]
    read: Callable[[], Iterable[Any]]
    size: tuple[int, int]
    grid: tuple[int, int, int]


class FrameProcessor:
    """Resizes and cuts frames by ``rules``. Thread-safe, and slow: never in an event loop."""

    def __init__(
        self, rules: FrameRules, config: VisionConfig, limits: VisualLimits, dtype: torch.dtype
    ) -> None:
        self._rules, self._config, self._limits, self._dtype = rules, config, limits, dtype
        self._files = VideoFileReader(limits)

    def open(self, video: Video | VideoFile, name: str) -> OpenedVideo:
        """Raises ``InvalidRequest`` naming the frame at fault, or the limit."""
        if isinstance(video, VideoFile):
            return self._open_file(video, name)
        count, most = len(video.frames), self._limits.max_pixels
        self._check_count(count, name)
        names = [f"{name}: frame {number}" for number in range(count)]
        sizes = [
            upright_size(open_image(frame, where, most), where)
            for frame, where in zip(video.frames, names, strict=True)
        ]
        width, height = sizes[0]
        for where, size in zip(names, sizes, strict=True):
            if size != sizes[0]:
                raise InvalidRequest(
                    f"{where} has {size[0]} x {size[1]} pixels, the first {width} x {height}: "
                    "frames of a video have one size"
                )

        def read() -> Iterable[Any]:
            for frame, where in zip(video.frames, names, strict=True):
                yield decoded(open_image(frame, where, most), where)

        size, grid = self._resizing(count, height, width, name)
        return OpenedVideo(
            name=name, times=video.times, rate=video.rate, content=video.frames, read=read,
            size=size, grid=grid,
        )  # fmt: skip

    def _open_file(self, video: VideoFile, name: str) -> OpenedVideo:
        sampling, about = self._rules.sampling.asked(video), self._files.about(video.data, name)
        try:
            count = sampling.count(about.frames, about.fps)
        except ValueError as error:
            raise InvalidRequest(f"{name} of {about.frames} frames: {error}") from None
        self._check_count(count, name)
        size, grid = self._resizing(count, about.height, about.width, name)
        indices = sampling.indices(about.frames, count)
        return OpenedVideo(
            name=name,
            times=tuple(index / about.fps for index in indices),
            rate=len(indices) / about.frames * about.fps,
            content=(video.data, repr(indices).encode()),
            read=partial(self._files.frames, video.data, about, indices, name),
            size=size,
            grid=grid,
        )

    def patched(self, opened: OpenedVideo) -> tuple[PatchedVisual, ...]:
        """What the tower reads: of all frames at once, or of each time that the prompt names.

        One frame at a time is decoded. Raises ``InvalidRequest`` naming one that cannot be.
        """
        return self._cut([_resized(frame, opened.size) for frame in opened.read()])

    def seconds(self, video: OpenedVideo) -> list[float]:
        """Of each time the mean of its first frame's and its last one's."""
        step = self._config.frames
        times = [*video.times, *[video.times[-1]] * (-len(video.times) % step)]
        return [(times[at] + times[at + step - 1]) / 2 for at in range(0, len(times), step)]

    def _check_count(self, count: int, name: str) -> None:
        if not 0 < count <= self._limits.max_video_frames:
            raise InvalidRequest(
                f"{name} has {count} frames, but max_video_frames is "
                f"{self._limits.max_video_frames}: send some of them, at a lower fps"
                if count
                else f"{name} has no frames"
            )

    def _resizing(
        self, count: int, height: int, width: int, name: str
    ) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Size and grid of an ``OpenedVideo``; raises ``InvalidRequest``."""
        most = self._limits.max_video_pixels
        if count * width * height > most:
            raise InvalidRequest(
                f"{name} has {count} frames of {width} x {height} pixels, more than "
                f"max_video_pixels={most} in all; send fewer or smaller ones"
            )
        try:
            rows, columns = self._size(count, height, width)
        except ValueError as error:  # too long and thin, or too few frames
            raise InvalidRequest(
                f"{name} of {count} frames of {width} x {height} pixels: {error}"
            ) from None
        patch = self._config.tower["patch_size"]
        return (rows, columns), (-(-count // self._config.frames), rows // patch, columns // patch)

    def _size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width that frames are resized to; ``ValueError`` says why there is none."""
        rules, factor = self._rules, self._config.tower["patch_size"] * self._config.merge
        least, most, frame = rules.least, rules.most, self._config.frames
        if rules.together:
            from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

            if rules.cap is not None:
                each = min(rules.cap * factor**2, most // frames)
                most = max(each, int(least * 1.05)) * frames
            found = smart_resize(frames, height, width, frame, factor, least, most)
        else:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

            if rules.cap is not None:
                shared = int(rules.cap * factor**2 * 0.9) * frame // frames
                most = max(min(most, shared), int(least * 1.05))
            found = smart_resize(height, width, factor, least, most)
        return int(found[0]), int(found[1])

    def _cut(self, resized: Sequence[Tensor]) -> tuple[PatchedVisual, ...]:
        """Of uint8 [3, rows, columns]; the last is repeated until they fill the last time."""
        rules, config, patch = self._rules, self._config, self._config.tower["patch_size"]
        padded = [*resized, *[resized[-1]] * (-len(resized) % config.frames)]
        factor = 1.0 / rules.scale
        mean, std = (
            (torch.tensor(each) * factor).view(3, 1, 1) for each in (rules.mean, rules.std)
        )
        time = len(padded) // config.frames
        rows, columns = padded[0].shape[1] // patch, padded[0].shape[2] // patch
        values = torch.stack(padded).to(torch.float32).sub_(mean).div_(std)
        merge = config.merge
        patches = (
            # [time, frames of a time, 3, part, its rows, pixels, part, its columns, pixels]
            values.view(
                *(time, config.frames, 3),
                *(rows // merge, merge, patch),
                *(columns // merge, merge, patch),
            )
            .permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
            .reshape(time, rows * columns, config.patch_values)
            .to(self._dtype)
        )
        if rules.together:
            each = [(pixels, (1, rows, columns)) for pixels in patches]
        else:
            each = [(patches.flatten(0, 1), (time, rows, columns))]
        return tuple(PatchedVisual(pixels=p, grid=grid, merge=merge) for p, grid in each)


def _resized(frame: Any, size: tuple[int, int]) -> Tensor:
    """uint8 [3, *size] of an RGB image of Pillow, or an array [height, width, 3]."""
    pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None].contiguous()
    return torch.nn.functional.interpolate(
        pixels, size, mode="bicubic", align_corners=False, antialias=True
    )[0]


def _of_files(directory: Path) -> tuple[str, Mapping[str, Any]]:
    """The name of the file that has a checkpoint's settings for videos, and those."""
    if (file := directory / _NESTED).is_file():
        nested = read_json(file).get("video_processor")
        if nested is not None:
            return _NESTED, nested
    for name in _FILES:
        if (directory / name).is_file():
            return name, read_json(directory / name)
    raise ConfigError(f"{directory} has none of {', '.join(_FILES)}")
