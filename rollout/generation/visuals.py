"""Images and videos of a prompt: as they are given, and as the engine computes with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from rollout.errors import InvalidRequest

MAX_VIDEO_BYTES = 256 << 20  # of a file; over the network limits of bodies are below it
SAMPLING = ("fps", "num_frames", "min_frames", "max_frames", "do_sample_frames")
_WORDS = {2: torch.int16, 4: torch.int32}  # as which the bits of a value are hashed


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """Frames of a video as whole files of images, not yet looked into: all are seen.

    ``times``: seconds from its beginning to each frame, as many as frames. ``rate``: frames a
    second, above 0.
    """

    frames: tuple[bytes, ...]
    times: tuple[float, ...]
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFile:
    """A whole file of a video, not yet looked into: the engine samples its frames, as the settings
    of the checkpoint's processor of the same names say, or these where they are not None.
    """

    data: bytes
    fps: float | None = None  # frames a second to be seen
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    do_sample_frames: bool | None = None

    @classmethod
    def of(cls, data: bytes, said: Mapping[str, Any], where: str) -> VideoFile:
        """With what ``said`` has of the fields; raises ``InvalidRequest`` naming what it cannot."""
        found = {name: said[name] for name in SAMPLING if said.get(name) is not None}
        for name, value in found.items():
            if name == "do_sample_frames":
                is_good = isinstance(value, bool)
            elif name == "fps":
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                is_good = is_number and 0 < value < math.inf
            else:
                is_good = type(value) is int and 0 < value < 1 << 31
            if not is_good:
                raise InvalidRequest(f"{where}: {name} cannot be {value!r:.80}")
        if "fps" in found and "num_frames" in found:
            raise InvalidRequest(f"{where}: give fps or num_frames, not both")
        if found.get("min_frames", 1) > found.get("max_frames", math.inf):
            raise InvalidRequest(f"{where}: min_frames is above max_frames")
        return cls(data=data, **found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visuals:
    """What a prompt shows, each kind in the order of its placeholders.

    ``images``: whole files (PNG, JPEG, WebP, GIF or BMP), not yet looked into.
    """

    images: tuple[bytes, ...] = ()
    videos: tuple[Video | VideoFile, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)


@dataclass(frozen=True, slots=True)
class VisualPrompt:
    """A text or token ids with what their placeholders stand for."""

    prompt: str | Sequence[int]
    visuals: Visuals


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchedVisual:
    """An image, or frames of a video, as the tower reads it: ``pixels`` [patches, values of a
    patch] of ``grid`` (time, rows, columns) patches; ``merge`` by ``merge`` of them are one part,
    and one token.
    """

    pixels: Tensor
    grid: tuple[int, int, int]
    merge: int

    @property
    def cells(self) -> tuple[int, int, int]:
        """Parts along time, rows and columns."""
        time, rows, columns = self.grid
        return time, rows // self.merge, columns // self.merge

    @property
    def count(self) -> int:
        """Tokens that stand for it."""
        time, rows, columns = self.cells
        return time * rows * columns

    @cached_property
    def digest(self) -> bytes:
        """32 bytes of what the tower reads: equal ones give equal features of equal weights."""
        hashed = blake2b(f"{self.grid}{self.merge}{self.pixels.dtype}".encode(), digest_size=32)
        words: Any = self.pixels.contiguous().view(-1).view(_WORDS[self.pixels.element_size()])
        hashed.update(words.numpy())
        return hashed.digest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedVisual:
    """What ``visual.count`` placeholders from ``start`` of the prompt on stand for.

    ``pace``: by how much positions rise from one of the grid's times to the next.
    """

    visual: PatchedVisual
    start: int
    pace: float = 1.0

    @property
    def stop(self) -> int:
        return self.start + self.visual.count

    @property
    def digest(self) -> bytes:
        """32 bytes of all that keys and values of its tokens depend on."""
        if self.visual.grid[0] == 1:
            return self.visual.digest
        paced = blake2b(self.visual.digest, digest_size=32)
        paced.update(f"{self.pace}".encode())
        return paced.digest()
