"""A process of its own that reads one file of a video, run as a script by ``video_files``.

Files may come from anywhere, and decoders are C: what crashes, hangs or fills its memory here is
one refused request. So it imports PyAV and numpy alone, and has bounds on memory and time.

Standard input: a line of JSON, the job, then the file. Standard output: lines of JSON. A job
without ``indices`` is answered ``{"frames", "fps", "width", "height"}``, else by ``{"frame"}``
in the order of its rising indices, each followed by uint8 [height, width, 3]; both may say
``{"error"}`` instead. Sizes are those of the upright picture.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any

FORMATS = "mov,mp4,matroska,webm,avi"  # no playlists: those name further files and addresses
MEMORY = 4 << 30  # bytes of address space


class FileError(Exception):
    """What is wrong with the file, to be read behind its name."""


def main() -> None:
    job = json.loads(sys.stdin.buffer.readline())
    resource.setrlimit(resource.RLIMIT_CPU, (job["seconds"] + 1, job["seconds"] + 1))
    with suppress(OSError, ValueError):  # a system without it, or a lower bound that holds already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    data = BytesIO(sys.stdin.buffer.read())
    try:
        if job.get("indices") is None:
            _say(_about(data, job))
        else:
            _send(data, job)
    except FileError as error:
        _say({"error": str(error)})
    except MemoryError:
        _say({"error": f"needs more than {MEMORY} bytes of memory to decode"})
    except Exception as error:  # noqa: BLE001 - whatever a file makes the libraries raise
        said = f"{type(error).__name__}: {error}"[:200]
        _say({"error": f"is no video that can be decoded, MP4, MOV, WebM, MKV or AVI ({said})"})


def _about(data: BytesIO, job: dict[str, Any]) -> dict[str, Any]:
    """The frames are counted, as a header says what it likes; the first is decoded."""
    container, stream = _opened(data, job)
    count, begin, end = 0, None, None
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard:
            continue
        count += 1
        if packet.pts is not None:
            begin = packet.pts if begin is None else min(begin, packet.pts)
            last = packet.pts + (packet.duration or 0)
            end = last if end is None else max(end, last)
    fps = stream.average_rate
    if not fps and begin is not None and end is not None and end > begin:
        fps = count / ((end - begin) * stream.time_base)
    if not count or not fps or fps <= 0:
        raise FileError("has no frames, or no frame rate")
    container, stream = _opened(data, job)
    coded = stream.codec_context
    _check_size(coded.width, coded.height, job["max_pixels"])
    for frame in container.decode(stream):
        width, height = _upright_size(frame)
        _check_size(width, height, job["max_pixels"])
        return {"frames": count, "fps": float(fps), "width": width, "height": height}
    raise FileError("has no frame that can be decoded")


def _send(data: BytesIO, job: dict[str, Any]) -> None:
    import numpy as np

    for index, frame in _wanted(data, job):
        if (size := _upright_size(frame)) != (job["width"], job["height"]):
            raise FileError(
                f"changes its size: frame {index} has {size[0]} x {size[1]} pixels, the first "
                f"{job['width']} x {job['height']}"
            )
        pixels = np.rot90(frame.to_ndarray(format="rgb24"), _turns(frame))
        _say({"frame": index})
        sys.stdout.buffer.write(pixels.tobytes())
    sys.stdout.buffer.flush()


def _wanted(data: BytesIO, job: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """Frames by number in the order in which they are shown. What lies between two key frames and
    is not wanted is not decoded.
    """
    container, stream = _opened(data, job)
    packets = [
        (packet.pts, packet.is_keyframe, packet.is_discard)
        for packet in container.demux(stream)
        if packet.size
    ]
    indices: list[int] = job["indices"]
    shown = [pts for pts, _, discarded in packets if not discarded]
    timed = None not in shown and len(set(shown)) == len(shown) and indices[-1] < len(shown)
    order = sorted(shown) if timed else range(len(packets))  # the number stands for a time
    pending = [(order[index], index) for index in indices if index < len(order)]
    needed = _needed(packets, {time for time, _ in pending}) if timed else None
    container, stream = _opened(data, job)
    at = 0
    for number, frame in enumerate(_decoded(container, stream, needed)):
        time = frame.pts if timed else number
        while at < len(pending) and time is not None and time >= pending[at][0]:
            yield pending[at][1], frame
            at += 1
        if at == len(indices):
            return
    raise FileError(f"ends, or is damaged, before frame {indices[at]}")


def _needed(packets: Sequence[tuple[int, bool, bool]], wanted: set[int]) -> set[int]:
    """Numbers of the packets to decode: all from a key frame to the next where one is wanted, and
    those before it, too, where one is shown before that key frame, as it may build on both.
    """
    starts = [number for number, packet in enumerate(packets) if packet[1]]
    if not starts or starts[0]:
        starts.insert(0, 0)
    groups = [range(*ends) for ends in zip(starts, [*starts[1:], len(packets)], strict=True)]
    needed: set[int] = set()
    for number, group in enumerate(groups):
        found = [packets[at][0] for at in group if packets[at][0] in wanted]
        if found:
            needed.update(group)
            if min(found) < packets[group[0]][0] and number:
                needed.update(groups[number - 1])
    return needed


def _decoded(container: Any, stream: Any, needed: set[int] | None) -> Iterator[Any]:
    """Frames of the ``needed`` packets (None: of all), in the order in which they are shown."""
    context, fed = stream.codec_context, False
    packets = (packet for packet in container.demux(stream) if packet.size)
    for number, packet in enumerate(packets):
        if needed is None or number in needed:
            yield from context.decode(packet)
            fed = True
        elif fed:
            yield from context.decode(None)
            context.flush_buffers()
            fed = False
    if fed:
        yield from context.decode(None)


def _opened(data: BytesIO, job: dict[str, Any]) -> tuple[Any, Any]:
    import av

    data.seek(0)
    rules = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
    container: Any = av.open(data, options=rules)
    stream = container.streams.best("video")
    if stream is None:
        raise FileError("has no video stream")
    stream.codec_context.thread_count = 1  # requests run beside the engine
    # What decoders take beside a picture, its edges, counts there as well.
    stream.codec_context.options = {"max_pixels": str(2 * job["max_pixels"] + (1 << 20))}
    return container, stream


def _check_size(width: int, height: int, most: int) -> None:
    if width * height > most:
        raise FileError(
            f"has frames of {width} x {height} pixels, more than max_image_pixels={most}"
        )


def _turns(frame: Any) -> int:
    """Quarters, counterclockwise, by which its display matrix turns it."""
    degrees: int = frame.rotation
    return round(degrees / 90) % 4


def _upright_size(frame: Any) -> tuple[int, int]:
    turned = _turns(frame) % 2
    return (frame.height, frame.width) if turned else (frame.width, frame.height)


def _say(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
