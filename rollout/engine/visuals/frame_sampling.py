"""Which frames of a file are seen, as transformers' video processors choose them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rollout.generation import VideoFile
from rollout.generation.visuals import SAMPLING


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSampling:
    """``fps`` frames a second, at least ``min_frames`` and at most ``max_frames``, or
    ``num_frames``; both None, or not ``do_sample_frames``: all.

    ``step``: frames of one time, of which Qwen2-VL's processor takes whole ones alone (None: the
    one of Qwen3-VL).
    """

    fps: float | None
    num_frames: int | None
    min_frames: int
    max_frames: int
    do_sample_frames: bool
    step: int | None

    @classmethod
    def read(cls, values: Mapping[str, Any], step: int | None) -> FrameSampling:
        """Of a processor's file, with transformers' defaults."""
        num_frames = values.get("num_frames")
        fps = values.get("fps", None if step else 2) if num_frames is None else None
        return cls(
            fps=fps,
            num_frames=num_frames,
            min_frames=values.get("min_frames", 4),
            max_frames=values.get("max_frames", 768),
            do_sample_frames=values.get("do_sample_frames", step is None),
            step=step,
        )

    def asked(self, video: VideoFile) -> FrameSampling:
        """As a request changes it: who names a number or a rate wants a sample."""
        said = {name: getattr(video, name) for name in SAMPLING}
        said = {name: value for name, value in said.items() if value is not None}
        if "fps" in said or "num_frames" in said:
            said = {"fps": None, "num_frames": None, "do_sample_frames": True, **said}
        return replace(self, **said)

    def count(self, total: int, rate: float) -> int:
        """How many of ``total`` frames, ``rate`` of them a second; ``ValueError`` says why none."""
        if not self.do_sample_frames:
            return total
        if self.num_frames is not None:
            count = self.num_frames
            if self.step is not None:
                count = round(count / self.step) * self.step
                if not 0 < count <= total:
                    raise ValueError(f"{count} frames cannot be sampled of {total}")
            return count
        if self.fps is None:
            return total if self.step else min(max(total, self.min_frames), self.max_frames)
        wanted = min(total / rate * self.fps, total)  # which may be more than an integer holds
        if self.step is None:
            return min(max(int(wanted), self.min_frames), self.max_frames, total)
        most = min(self.max_frames, total) // self.step * self.step
        count = math.floor(min(max(wanted, self.min_frames), most, total) / self.step) * self.step
        if not count:
            raise ValueError(f"times of {self.step} frames cannot be sampled of {total}")
        return count

    def indices(self, total: int, count: int) -> list[int]:
        """``count`` of ``total`` frames, spread evenly; they rise, and repeat beyond ``total``."""
        if not self.do_sample_frames:
            return list(range(total))
        if self.step is None:
            found: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
            return found
        return list(torch.arange(0, total, total / count).int().tolist())
