"""How much a prompt may show."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.errors import InvalidRequest
from rollout.generation import Visuals


@dataclass(frozen=True, slots=True, kw_only=True)
class VisualLimits:
    """``max_images`` and ``max_videos`` of one prompt, each image and frame of at most
    ``max_pixels``, each video of at most ``max_video_frames`` of ``max_video_pixels`` in all;
    ``max_tokens``: with them.
    """

    max_images: int
    max_pixels: int
    max_videos: int
    max_video_frames: int
    max_video_pixels: int
    max_tokens: int

    def check(self, visuals: Visuals, where: str) -> None:
        """Raises ``InvalidRequest`` for too many."""
        for what, found, most in (
            ("images", visuals.images, self.max_images),
            ("videos", visuals.videos, self.max_videos),
        ):
            if len(found) > most:
                raise InvalidRequest(f"{where} has {len(found)} {what}, but max_{what} is {most}")
