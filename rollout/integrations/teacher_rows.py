"""A teacher's logprobs in the rows that verl's distillation reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def teacher_rows(
    token_ids: Sequence[int], rows: Sequence[Mapping[int, float] | None], top: int
) -> tuple[list[list[int]], list[list[float]]]:
    """``prompt_ids`` and ``prompt_logprobs``, one row of ``max(top, 1)`` for each token: entry i is
    of the token after it, the ``top`` most likely ones, or that one alone where ``top`` is 0. The
    last row, after which nothing comes, is zeros; so is what was not scored.
    """
    width = max(top, 1)
    ids: list[list[int]] = []
    logprobs: list[list[float]] = []
    for token, row in zip(token_ids[1:], rows[1:], strict=True):
        if row is None:
            best = [(0, 0.0)] * width
        elif top:
            best = list(row.items())[:top]  # as they come: the most likely first
        else:
            best = [(token, row[token])]
        ids.append([one for one, _ in best])
        logprobs.append([value for _, value in best])
    ids.append([0] * width)
    logprobs.append([0.0] * width)
    return ids, logprobs
