"""Images of a prompt to patches, by the image processor of the checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from rollout.engine.images.placeholders import place
from rollout.engine.images.reader import decoded, open_image, pillow, upright_size
from rollout.errors import ConfigError, InvalidRequest, PromptTooLong
from rollout.generation import PatchedImage, PlacedImage
from rollout.models.config.vision import VisionConfig

FILE = "preprocessor_config.json"
KEPT_BYTES = 256 << 20  # of patches, for the same image in the next request


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """``max_images`` of one prompt, each of at most ``max_pixels``; ``max_tokens``: with them."""

    max_images: int
    max_pixels: int
    max_tokens: int


class ImageProcessor:
    """transformers' processor over Pillow (torchvision is not needed), behind bounds.

    Thread-safe; takes milliseconds to seconds: never to be called in an event loop.
    """

    def __init__(
        self, hf: Any, config: VisionConfig, limits: ImageLimits, dtype: torch.dtype
    ) -> None:
        self.limits = limits
        self._hf, self._config, self._dtype = hf, config, dtype
        self._kept: OrderedDict[bytes, PatchedImage] = OrderedDict()  # by the file's digest
        self._keeping = Lock()
        for name, wanted in (
            ("patch_size", config.tower["patch_size"]),
            ("merge_size", config.merge),
            ("temporal_patch_size", config.tower["temporal_patch_size"]),
        ):
            if getattr(hf, name, None) != wanted:
                raise ConfigError(
                    f"{FILE}: {name} {getattr(hf, name, None)} is not the model's {wanted}"
                )

    @classmethod
    def load(
        cls, directory: str, config: VisionConfig, limits: ImageLimits, dtype: torch.dtype
    ) -> ImageProcessor | None:
        """Of a checkpoint; None where it has no processor's file. Raises ``ConfigError``."""
        if not (Path(directory) / FILE).is_file():
            return None
        pillow()
        from transformers import AutoImageProcessor

        try:
            hf = AutoImageProcessor.from_pretrained(
                directory, backend="pil", trust_remote_code=False
            )
        except Exception as error:
            raise ConfigError(
                f"the image processor of {directory} cannot be loaded: {str(error)[:300]}"
            ) from error
        return cls(hf, config, limits, dtype)

    def prepare(
        self, ids: Sequence[int], images: Sequence[bytes], where: str = "the prompt"
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """The prompt with a placeholder for each part, and its images in their places.

        Raises ``InvalidRequest`` naming the image at fault, ``PromptTooLong`` before one is decoded
        that could not fit.
        """
        limits = self.limits
        if len(images) > limits.max_images:
            raise InvalidRequest(
                f"{where} has {len(images)} images, but max_images is {limits.max_images}"
            )
        names = [f"{where}: image {number}" for number in range(len(images))]
        opened = [
            open_image(data, name, limits.max_pixels)
            for data, name in zip(images, names, strict=True)
        ]
        counts = [self._count(image, name) for image, name in zip(opened, names, strict=True)]
        expanded, starts = place(ids, counts, self._config.image_token, where)
        if len(expanded) >= limits.max_tokens:
            raise PromptTooLong(
                f"{where} has {len(expanded)} tokens, {sum(counts)} of them for images, but "
                f"max_model_len is {limits.max_tokens} and one token at least must fit after it"
            )
        patched = [
            self._patched(data, image, name)
            for data, image, name in zip(images, opened, names, strict=True)
        ]
        placed = zip(patched, starts, strict=True)
        return expanded, tuple(PlacedImage(image=image, start=start) for image, start in placed)

    def _count(self, image: Any, name: str) -> int:
        """Tokens of an image, by its size alone."""
        width, height = upright_size(image, name)
        try:
            patches: int = self._hf.get_number_of_image_patches(height, width)
        except ValueError as error:  # it is too long and thin
            raise InvalidRequest(f"{name} of {width} x {height} pixels: {error}") from None
        return patches // self._config.merge**2

    def _patched(self, data: bytes, image: Any, name: str) -> PatchedImage:
        key = blake2b(data, digest_size=32).digest()
        with self._keeping:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        out = self._hf(images=[decoded(image, name)], return_tensors="pt")
        time, rows, columns = out["image_grid_thw"][0].tolist()
        patched = PatchedImage(
            pixels=out["pixel_values"].to(self._dtype),
            grid=(time, rows, columns),
            merge=self._config.merge,
        )
        assert patched.pixels.shape[1] == self._config.patch_values
        assert patched.digest  # made here, in this thread
        with self._keeping:
            self._kept[key] = patched
            while sum(each.pixels.nbytes for each in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return patched
