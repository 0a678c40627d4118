"""How fast this machine copies and digests weights: what estimates of updates rest on."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rollout.kernels import digest
from rollout.weights import Box

PROBE = 4 << 20  # elements of float32 that the rates are measured on


def measured_rates() -> tuple[float, float]:
    """Bytes a second of a copy and of a digest in this process; the better of two tries each.

    On the host, in about 50 ms.
    """
    held = torch.ones(PROBE)
    other = torch.empty_like(held)
    box = Box.full(tuple(held.shape))
    copied = min(_seconds(lambda: other.copy_(held)) for _ in range(2))
    digested = min(_seconds(lambda: digest(held, tuple(held.shape), box)) for _ in range(2))
    return held.nbytes / copied, held.nbytes / digested


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return max(time.perf_counter() - started, 1e-9)
