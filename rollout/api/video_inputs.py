"""Videos as callers give them: frames, and how fast they follow each other, or files.

A video is ``(frames, metadata)``, as vLLM takes it, or a part of a message,
``{"type": "video", "video": frames, "fps": ...}``. Frames are a uint8 array [frames, height, width,
3], a list of images, or a ``data:video/jpeg`` URI, vLLM's, of one frame after the other. All of
them are seen: who wants fewer, samples before. In the place of frames may be a file (its bytes, a
``pathlib.Path``, a ``data:video/mp4`` URI), which goes to the engine as it is and is sampled there.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from rollout.api.image_files import data_uri_bytes, image_file
from rollout.errors import InvalidRequest
from rollout.generation import Video, VideoFile
from rollout.generation.visuals import MAX_VIDEO_BYTES, SAMPLING

_KIND = "data:video/jpeg;base64,"  # of frames of any format of images
_FRAMES = (
    "frames are a uint8 array [frames, height, width, 3], a list of images, or a URI "
    f"{_KIND}FRAME,FRAME,...; a file of a video is its bytes, a pathlib.Path, or a URI "
    "data:video/mp4;base64,FILE"
)
_TIMES = ("frames_indices", "total_num_frames")  # beside fps, of frames
FIELDS = (*SAMPLING, *_TIMES)  # what metadata says that is used
_SUFFIXES = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi")


def as_video(given: Any, where: str) -> Video | VideoFile:
    """Of (frames, metadata), or of a file, which needs no metadata. Raises ``InvalidRequest``
    naming what it cannot have.

    ``metadata``: ``fps``, of the video that the frames are from; ``frames_indices``, which of its
    frames they are (default: all, from the first on), of ``total_num_frames``. Of a file: the
    fields of ``VideoFile``.
    """
    frames, metadata = given, None
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping | None):
        frames, metadata = given
    said: dict[str, Any] = dict(metadata or {})
    if (file := _video_file(frames, where)) is not None:
        if said.get("frames_indices") is not None:
            raise InvalidRequest(f"{where}: frames_indices are those of frames, not of a file")
        return VideoFile.of(file, said, where)
    files = _files(frames, where)
    if said.get("do_sample_frames"):
        raise InvalidRequest(f"{where}: do_sample_frames: all frames are seen; sample them before")
    fps: Any = said.get("fps")
    if not _is_number(fps) or not 0 < fps < math.inf:
        raise InvalidRequest(
            f'{where} needs the frames per second of the video, (frames, {{"fps": 2.0}}), in a '
            f'message "fps" beside "video", got {fps!r:.80}'
        )
    indices, total = said.get("frames_indices"), said.get("total_num_frames")
    if indices is None:
        indices, total = range(len(files)), len(files)
    indices = _indices(indices, len(files), where)
    total = indices[-1] + 1 if total is None else total
    if not _is_number(total) or total <= indices[-1]:
        raise InvalidRequest(f"{where}: total_num_frames {total!r:.80} is not above the last index")
    # As transformers computes both.
    times, rate = tuple(index / fps for index in indices), len(indices) / total * fps
    return Video(frames=files, times=tuple(map(float, times)), rate=float(rate))


def video_part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A part of a message as JSON; raises ``InvalidRequest``."""
    frames = part.get("video")
    url = frames
    if not isinstance(frames, str) and (file := _video_file(frames, where)) is not None:
        url = f"data:video/mp4;base64,{base64.b64encode(file).decode()}"
    elif not isinstance(frames, str):
        url = _KIND + ",".join(base64.b64encode(f).decode() for f in _files(frames, where))
    said = {name: part[name] for name in FIELDS if part.get(name) is not None}
    if "frames_indices" in said:
        said["frames_indices"] = _listed(said["frames_indices"])
    return {"type": "video_url", "video_url": {"url": url}, **said}


def is_frame(given: Any) -> bool:
    """Whether this is an image, and not frames of one video among several."""
    if isinstance(given, str):
        return not given.startswith("data:video/")
    if isinstance(given, os.PathLike):
        return Path(given).suffix.lower() not in _SUFFIXES
    if isinstance(given, bytes | bytearray | memoryview):
        return not _looks_like_video(bytes(given[:16]))
    return getattr(given, "ndim", None) == 3 or hasattr(given, "convert")


def _looks_like_video(head: bytes) -> bool:
    """Whether a file that begins so is MP4, MOV, WebM, MKV or AVI."""
    riff = head[:4] == b"RIFF" and head[8:11] == b"AVI"
    return head[4:8] == b"ftyp" or head[:4] == b"\x1aE\xdf\xa3" or riff


def _video_file(given: Any, where: str) -> bytes | None:
    """The whole file that is given in the place of frames; None: those are given."""
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, str) and given.startswith("data:") and not given.startswith(_KIND):
        return data_uri_bytes(given, where)
    if not isinstance(given, os.PathLike):
        return None
    path = Path(given)
    try:
        if not path.is_file():  # a pipe or a device may have no end
            raise InvalidRequest(f"{where} cannot be read: {path} is no file")
        with path.open("rb") as file:
            data = file.read(MAX_VIDEO_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"{where} cannot be read: {error}") from error
    if len(data) > MAX_VIDEO_BYTES:
        raise InvalidRequest(f"{where} has more than {MAX_VIDEO_BYTES} bytes: send less of it")
    return data


def _files(frames: Any, where: str) -> tuple[bytes, ...]:
    """Each frame as the file of an image."""
    if isinstance(frames, str) and frames.startswith(_KIND):
        each = frames.removeprefix(_KIND).split(",")
        return tuple(
            data_uri_bytes(f"{_KIND}{one}", f"{where}: frame {n}") for n, one in enumerate(each)
        )
    if getattr(frames, "ndim", None) == 4:
        frames = list(frames)
    if not isinstance(frames, list | tuple) or not frames:
        raise InvalidRequest(f"{where} is a {type(frames).__name__}: {_FRAMES}")
    return tuple(_file(frame, f"{where}: frame {n}") for n, frame in enumerate(frames))


def _file(frame: Any, where: str) -> bytes:
    if not hasattr(frame, "ndim"):
        return image_file(frame, where)
    array = np.asarray(frame.cpu() if hasattr(frame, "cpu") else frame)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        shape = " x ".join(map(str, array.shape))
        raise InvalidRequest(f"{where} is an array of {array.dtype}, {shape}: {_FRAMES}")
    from rollout.engine.visuals.reader import pillow

    out = BytesIO()
    pillow().fromarray(array).save(out, format="BMP")  # not packed: as fast as it can be
    return out.getvalue()


def _indices(given: Any, count: int, where: str) -> list[int]:
    indices = _listed(given)
    whole = isinstance(indices, list | range) and all(type(one) is int for one in indices)
    if not whole or len(indices) != count or indices[0] < 0 or sorted(indices) != list(indices):
        raise InvalidRequest(
            f"{where}: frames_indices must be {count} rising integers from 0 on, one for each frame"
        )
    return list(indices)


def _listed(given: Any) -> Any:
    """An array as a list; anything else as it is."""
    return given.tolist() if hasattr(given, "tolist") else given


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float | np.number) and not isinstance(given, bool)
