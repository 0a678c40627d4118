"""Images and videos of a prompt: as they are given, and as the engine computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

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
class Visuals:
    """What a prompt shows, each kind in the order of its placeholders.

    ``images``: whole files (PNG, JPEG, WebP, GIF or BMP), not yet looked into.
    """

    images: tuple[bytes, ...] = ()
    videos: tuple[Video, ...] = ()

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
