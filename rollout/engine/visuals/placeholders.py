"""Placeholders among the tokens of a prompt: one for each image or video, or one for each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rollout.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedVideo:
    """A video that lies in a prompt time by time: ``count`` placeholders each, and ``end``.

    ``before``: the ids in front of each time's placeholders; None: nobody can write them.
    """

    times: int
    before: Sequence[Sequence[int]] | None
    count: int
    end: int

    def is_written(self, ids: Sequence[int]) -> bool:
        """Whether one placeholder behind ``ids`` is all that there is of the first time."""
        first = [] if self.before is None else list(self.before[0])
        return self.count == 1 and list(ids[-len(first) :]) == first


def place(
    ids: Sequence[int], counts: Sequence[int], token: int, where: str, what: str = "image"
) -> tuple[list[int], list[int]]:
    """``ids`` with ``counts[i]`` times ``token`` for image i, and where each image begins.

    ``what`` they are, in errors: images, or anything else.

    A run of placeholders is either one, which is expanded, or has as many as its image has parts:
    then it was expanded before, by a template, a processor, or an earlier answer. Images that touch
    are expanded together or not at all. Where there are as many placeholders as images, each is
    one. Raises ``InvalidRequest`` naming the image whose run has another length, and where there
    are more or fewer of them than images.
    """
    out: list[int] = []
    starts: list[int] = []
    one_each = ids.count(token) == len(counts)
    for is_image, group in groupby(ids, token.__eq__):
        run = list(group)
        if not is_image:
            out += run
            continue
        done = len(starts)
        left = counts[done:]
        for count in left[: len(run)] if one_each else _of_run(len(run), left, done, where, what):
            starts.append(len(out))
            out += [token] * count
    if len(starts) < len(counts):
        raise InvalidRequest(
            f"{where} has {len(counts)} {what}s, but placeholders (token {token}) for "
            f"{len(starts)} of them"
        )
    return out, starts


def timed(ids: Sequence[int], videos: Sequence[TimedVideo], token: int, where: str) -> list[int]:
    """``ids`` with the times of a video, and a placeholder for each, where it has one placeholder.

    A run of as many as a time has parts belongs to a video that was expanded before, as do the
    next ones for its other times. Raises ``InvalidRequest`` naming the video whose run has another
    length, and where there are placeholders for more or fewer of them.
    """
    out: list[int] = []
    one_each = ids.count(token) == len(videos)
    done = left = 0  # videos; times of the last of them, whose placeholders follow
    for is_video, group in groupby(ids, token.__eq__):
        run = list(group)
        if not is_video:
            out += run
            continue
        for _ in run if one_each else run[:1]:
            if not left and done == len(videos):
                raise InvalidRequest(
                    f"{where} has placeholders for more videos than the {done} it has"
                )
            video = videos[done - 1 if left else done]
            if not left and (one_each or len(run) == 1) and not video.is_written(out):
                out += _times(video, token, f"{where}: video {done}")
                done += 1
                continue
            number, at = (done - 1, left) if left else (done, video.times)
            if len(run) != video.count:
                raise InvalidRequest(
                    f"{where}: video {number} takes {video.count} tokens at each of its "
                    f"{video.times} times, but its run of placeholders has {len(run)}: send one "
                    "for the whole video, or what a processor makes of it"
                )
            done, left = number + 1, at - 1
            out += run
    if done < len(videos) or left:
        raise InvalidRequest(
            f"{where} has {len(videos)} videos, but placeholders (token {token}) for "
            f"{done - bool(left)} of them"
        )
    return out


def _times(video: TimedVideo, token: int, name: str) -> list[int]:
    if video.before is None:
        raise InvalidRequest(
            f"{name}: its times cannot be written without a tokenizer; send what a processor makes "
            "of its placeholder"
        )
    return [number for before in video.before for number in (*before, token, video.end)]


def _of_run(length: int, counts: Sequence[int], first: int, where: str, what: str) -> Sequence[int]:
    """The counts of the images that a run of ``length`` placeholders stands for."""
    total = 0
    for number, count in enumerate(counts, 1):
        total += count
        if total == length:
            return counts[:number]
    if length <= len(counts):
        return counts[:length]
    if not counts:
        raise InvalidRequest(f"{where} has placeholders for more {what}s than the {first} it has")
    raise InvalidRequest(
        f"{where}: {what} {first} takes {counts[0]} tokens, but its run of placeholders has "
        f"{length}: send one for each {what}, or as many as its parts"
    )
