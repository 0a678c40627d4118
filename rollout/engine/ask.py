"""Waiting for the answers of all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from rollout.engine.executors import Reply
from rollout.errors import DeadlineExceeded, RolloutError


def replies_of(futures: Sequence[Future[Reply]], method: str, timeout: float) -> list[Reply]:
    """Every rank's answer to ``method``, by rank; a timeout names the rank and the method."""
    deadline = time.monotonic() + timeout
    replies = []
    for rank, future in enumerate(futures):
        try:
            replies.append(future.result(max(0.0, deadline - time.monotonic())))
        except FutureTimeout as error:
            if isinstance(error, RolloutError):
                raise
            raise DeadlineExceeded(
                f"rank {rank} did not answer {method} within {timeout:g} s"
            ) from error
    return replies
