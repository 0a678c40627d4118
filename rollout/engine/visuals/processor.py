"""What a prompt shows to patches in their places, by the processors of the checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from rollout.engine.sequences.visual_positions import VisualPositions
from rollout.engine.visuals.frames import FrameProcessor, FrameRules, OpenedVideo
from rollout.engine.visuals.limits import VisualLimits
from rollout.engine.visuals.placeholders import TimedVideo, place, timed
from rollout.engine.visuals.reader import decoded, open_image, pillow, upright_size
from rollout.errors import ConfigError, InvalidRequest, PromptTooLong
from rollout.generation import PatchedVisual, PlacedVisual, Visuals
from rollout.models.config.vision import VisionConfig

FILE = "preprocessor_config.json"
KEPT_BYTES = 256 << 20  # of patches, for the same image or video in the next request
Encode = Callable[[str], list[int]]


class VisualProcessor:
    """transformers' processor of images over Pillow and ours of frames (torchvision is not needed),
    behind bounds. ``encode``: a text to ids; None where there is no tokenizer.

    Thread-safe; takes milliseconds to seconds: never to be called in an event loop.
    """

    def __init__(
        self,
        hf: Any,
        frames: FrameProcessor | str,
        config: VisionConfig,
        limits: VisualLimits,
        dtype: torch.dtype,
        encode: Encode | None,
    ) -> None:
        self.limits = limits
        self._hf, self._config, self._dtype, self._encode = hf, config, dtype, encode
        self._frames = frames  # a text: why no videos are taken
        self._kept: OrderedDict[bytes, tuple[PatchedVisual, ...]] = OrderedDict()  # by content
        self._keeping = Lock()
        for name, wanted in (
            ("patch_size", config.tower["patch_size"]),
            ("merge_size", config.merge),
            ("temporal_patch_size", config.frames),
        ):
            if getattr(hf, name, None) != wanted:
                raise ConfigError(
                    f"{FILE}: {name} {getattr(hf, name, None)} is not the model's {wanted}"
                )

    @classmethod
    def load(
        cls,
        directory: str,
        config: VisionConfig,
        limits: VisualLimits,
        dtype: torch.dtype,
        encode: Encode | None,
    ) -> VisualProcessor | None:
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
        return cls(hf, _frames(directory, config, limits, dtype), config, limits, dtype, encode)

    def prepare(
        self, ids: Sequence[int], visuals: Visuals, where: str = "the prompt"
    ) -> tuple[list[int], tuple[PlacedVisual, ...]]:
        """The prompt with a placeholder for each part, and what it shows in its places.

        Raises ``InvalidRequest`` naming the image or video at fault, ``PromptTooLong`` before one
        is decoded that could not fit.
        """
        limits = self.limits
        limits.check(visuals, where)
        names = [f"{where}: image {number}" for number in range(len(visuals.images))]
        images = [
            open_image(data, name, limits.max_pixels)
            for data, name in zip(visuals.images, names, strict=True)
        ]
        counts = [self._count(image, name) for image, name in zip(images, names, strict=True)]
        videos = [
            self._taken(where).open(video, f"{where}: video {number}")
            for number, video in enumerate(visuals.videos)
        ]
        expanded, starts, video_starts = self._place(ids, counts, videos, where)
        if len(expanded) >= limits.max_tokens:
            kinds = {"images": sum(counts), "videos": sum(map(self._tokens, videos))}
            shown = " and ".join(f"{n} of them for {kind}" for kind, n in kinds.items() if n)
            raise PromptTooLong(
                f"{where} has {len(expanded)} tokens, {shown}, but max_model_len is "
                f"{limits.max_tokens} and one token at least must fit after it"
            )
        placed = []
        for data, image, name, start in zip(visuals.images, images, names, starts, strict=True):
            [visual] = self._once("image", (data,), partial(self._patched, image, name))
            placed.append(PlacedVisual(visual=visual, start=start))
        begin = iter(video_starts)
        for video in videos:
            pace = self._config.second * self._config.frames / video.rate
            make = partial(self._taken(where).patched, video)
            for visual in self._once("video", video.content, make):
                placed.append(PlacedVisual(visual=visual, start=next(begin), pace=pace))
        placed.sort(key=lambda one: one.start)
        self._check_lasting(placed, len(expanded), where)
        return expanded, tuple(placed)

    def _check_lasting(self, placed: Sequence[PlacedVisual], length: int, where: str) -> None:
        """Positions of all else are below the length: those of a video rise as long as it lasts."""
        lasting = [one for one in placed if one.visual.grid[0] > 1]
        if not lasting:
            return
        most = self.limits.max_tokens
        longest = max(one.pace * (one.visual.grid[0] - 1) for one in lasting)
        if longest < 1 << 31:  # else it may be more than an integer holds
            longest = VisualPositions(length, placed).highest
        if longest >= most:
            raise PromptTooLong(
                f"{where} has a video that lasts until position {longest:g}, but max_model_len is "
                f"{most}: positions rise by {self._config.second:g} in a second of a video; show "
                "less of it"
            )

    def _place(
        self, ids: Sequence[int], counts: Sequence[int], videos: Sequence[OpenedVideo], where: str
    ) -> tuple[list[int], list[int], list[int]]:
        """``ids`` with all placeholders, and where each image and each piece of a video begins."""
        config, token = self._config, self._config.video_token
        if not videos or token is None:
            return *place(ids, counts, config.image_token, where), []
        if config.frame_ends is None:
            pieces, what = [self._tokens(video) for video in videos], "video"
        else:
            ids = timed(ids, [self._timed(video) for video in videos], token, where)
            pieces = [self._tokens(v) // v.grid[0] for v in videos for _ in range(v.grid[0])]
            what = "time"
        ids, _ = place(ids, pieces, token, where, what)
        ids, starts = place(ids, counts, config.image_token, where)
        ids, video_starts = place(ids, pieces, token, where, what)  # behind images that were one
        return ids, starts, video_starts

    def _timed(self, video: OpenedVideo) -> TimedVideo:
        assert self._config.frame_ends is not None
        begin, end = self._config.frame_ends
        before = None
        if (encode := self._encode) is not None:
            texts = [f"<{second:.1f} seconds>" for second in self._taken("").seconds(video)]
            before = [[*encode(text), begin] for text in texts]
        count = self._tokens(video) // video.grid[0]
        return TimedVideo(times=video.grid[0], before=before, count=count, end=end)

    def _tokens(self, video: OpenedVideo) -> int:
        time, rows, columns = video.grid
        return time * rows * columns // self._config.merge**2

    def _taken(self, where: str) -> FrameProcessor:
        if isinstance(self._frames, str):
            raise InvalidRequest(f"{where} has videos, but {self._frames}")
        return self._frames

    def _count(self, image: Any, name: str) -> int:
        """Tokens of an image, by its size alone."""
        width, height = upright_size(image, name)
        try:
            patches: int = self._hf.get_number_of_image_patches(height, width)
        except ValueError as error:  # it is too long and thin
            raise InvalidRequest(f"{name} of {width} x {height} pixels: {error}") from None
        return patches // self._config.merge**2

    def _patched(self, image: Any, name: str) -> tuple[PatchedVisual, ...]:
        out = self._hf(images=[decoded(image, name)], return_tensors="pt")
        time, rows, columns = out["image_grid_thw"][0].tolist()
        visual = PatchedVisual(
            pixels=out["pixel_values"].to(self._dtype),
            grid=(time, rows, columns),
            merge=self._config.merge,
        )
        assert visual.pixels.shape[1] == self._config.patch_values
        return (visual,)

    def _once(
        self, kind: str, files: Iterable[bytes], make: Callable[[], tuple[PatchedVisual, ...]]
    ) -> tuple[PatchedVisual, ...]:
        """What ``make`` makes of ``files``, or has made of them before."""
        hashed = blake2b(kind.encode(), digest_size=32)
        for file in files:
            hashed.update(blake2b(file, digest_size=32).digest())
        key = hashed.digest()
        with self._keeping:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()
        for each in made:
            assert each.digest  # made here, in this thread
        with self._keeping:
            self._kept[key] = made
            held = sum(each.pixels.nbytes for kept in self._kept.values() for each in kept)
            while held > KEPT_BYTES:
                _, gone = self._kept.popitem(last=False)
                held -= sum(each.pixels.nbytes for each in gone)
        return made


def _frames(
    directory: str, config: VisionConfig, limits: VisualLimits, dtype: torch.dtype
) -> FrameProcessor | str:
    """A text where a checkpoint takes no videos: why."""
    if config.video_token is None:
        return "the model's vocabulary has no placeholder of them (video_token_id)"
    try:
        return FrameProcessor(FrameRules.read(directory, config), config, limits, dtype)
    except ConfigError as error:
        return str(error)
