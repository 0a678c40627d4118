"""Images of a prompt: as they are given, and as the engine computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

_WORDS = {2: torch.int16, 4: torch.int32}  # as which the bits of a value are hashed


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A text or token ids with the images of its placeholders, in their order.

    ``images``: whole files (PNG, JPEG, WebP, GIF or BMP), not yet looked into.
    """

    prompt: str | Sequence[int]
    images: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchedImage:
    """An image as the tower reads it: ``pixels`` [patches, values of a patch] of ``grid`` (time,
    rows, columns) patches; ``merge`` by ``merge`` of them are one part, and one token.
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
class PlacedImage:
    """An image whose ``count`` placeholders begin at ``start`` of the prompt."""

    image: PatchedImage
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.image.count
