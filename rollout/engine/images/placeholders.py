"""Placeholders of images among the tokens of a prompt: one for each image, or one for each part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rollout.errors import InvalidRequest


def place(
    ids: Sequence[int], counts: Sequence[int], token: int, where: str
) -> tuple[list[int], list[int]]:
    """``ids`` with ``counts[i]`` times ``token`` for image i, and where each image begins.

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
        for count in left[: len(run)] if one_each else _of_run(len(run), left, done, where):
            starts.append(len(out))
            out += [token] * count
    if len(starts) < len(counts):
        raise InvalidRequest(
            f"{where} has {len(counts)} images, but placeholders (token {token}) for "
            f"{len(starts)} of them"
        )
    return out, starts


def _of_run(length: int, counts: Sequence[int], first: int, where: str) -> Sequence[int]:
    """The counts of the images that a run of ``length`` placeholders stands for."""
    total = 0
    for number, count in enumerate(counts, 1):
        total += count
        if total == length:
            return counts[:number]
    if length <= len(counts):
        return counts[:length]
    if not counts:
        raise InvalidRequest(f"{where} has placeholders for more images than the {first} it has")
    raise InvalidRequest(
        f"{where}: image {first} takes {counts[0]} tokens, but its run of placeholders has "
        f"{length}: send one for each image, or as many as its parts"
    )
