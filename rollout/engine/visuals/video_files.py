"""Files of videos to frames, by PyAV in a process of its own (``video_child``)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np

from rollout.engine.visuals.limits import VisualLimits
from rollout.errors import InvalidRequest
from rollout.generation.visuals import MAX_VIDEO_BYTES

DEADLINE = 60  # seconds to look into a file, and again to decode what is wanted of it
_CHILD = Path(__file__).with_name("video_child.py")
_FRAMES = 'or decode it before and send its frames, (frames, {"fps": 2.0})'


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutVideo:
    """A file's video: how many frames there are, ``fps``, and their size when upright."""

    frames: int
    fps: float
    width: int
    height: int


class VideoFileReader:
    """Looks into files, and decodes frames of them. Thread-safe, and slow: never in an event loop.

    A file that is broken, takes more than ``deadline`` seconds, or makes the decoder crash is an
    ``InvalidRequest`` that names it.
    """

    def __init__(self, limits: VisualLimits, deadline: int = DEADLINE) -> None:
        self._limits, self._deadline = limits, deadline

    def about(self, data: bytes, name: str) -> AboutVideo:
        """The first frame alone is decoded."""
        if len(data) > MAX_VIDEO_BYTES:
            raise InvalidRequest(f"{name} has more than {MAX_VIDEO_BYTES} bytes: send less of it")
        with self._reading({}, data, name) as answers:
            return AboutVideo(**answers.next())

    def frames(
        self, data: bytes, about: AboutVideo, indices: Sequence[int], name: str
    ) -> Iterator[np.ndarray[Any, Any]]:
        """uint8 [height, width, 3] of each of ``indices``, which rise and may repeat."""
        size = {"width": about.width, "height": about.height}
        with self._reading({"indices": sorted(set(indices)), **size}, data, name) as answers:
            last, frame = -1, None
            for index in indices:
                if index != last:
                    answers.next()
                    frame = answers.pixels(about.height, about.width)
                    last = index
                assert frame is not None
                yield frame

    @contextmanager
    def _reading(self, job: Mapping[str, Any], data: bytes, name: str) -> Iterator[_Answers]:
        """A child at work, which has ended afterwards."""
        if importlib.util.find_spec("av") is None:
            raise InvalidRequest(
                f"{name} is a file, which needs PyAV where the engine runs: in a checkout, "
                f"pip install -c constraints.txt -e '.[video]'; {_FRAMES}"
            )
        bounds = {"seconds": self._deadline, "max_pixels": self._limits.max_pixels}
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps({**job, **bounds}).encode() + b"\n")
            file.write(data)
            file.seek(0)
            child = subprocess.Popen(
                [sys.executable, "-P", _CHILD],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        timer = Timer(self._deadline, child.kill)
        timer.daemon = True
        timer.start()
        try:
            yield _Answers(child, name, self._deadline)
        finally:
            timer.cancel()
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


class _Answers:
    """What a child says, as long as it does."""

    def __init__(self, child: subprocess.Popen[bytes], name: str, deadline: int) -> None:
        self._child, self._name, self._deadline = child, name, deadline
        self._began = time.monotonic()

    def next(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line.endswith(b"\n"):
            self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise InvalidRequest(f"{self._name} {answer['error']}; send another file, {_FRAMES}")
        return answer

    def pixels(self, height: int, width: int) -> np.ndarray[Any, Any]:
        """uint8 [height, width, 3]."""
        assert self._child.stdout is not None
        read = self._child.stdout.read(height * width * 3)
        if len(read) < height * width * 3:
            self._ended()
        return np.frombuffer(read, np.uint8).reshape(height, width, 3)

    def _ended(self) -> None:
        if time.monotonic() - self._began >= self._deadline:
            raise InvalidRequest(
                f"{self._name} takes more than {self._deadline} s to decode: send less of it, "
                f"a smaller one, {_FRAMES}"
            )
        raise InvalidRequest(
            f"{self._name} makes the decoder end with status {self._child.wait()}: it is damaged, "
            f"or no video; send another file, {_FRAMES}"
        )
