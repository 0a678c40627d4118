"""Uniform numbers from a counter: the same (seed, position) always gives the same draw."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, position), both int64 [n].

    Two rounds of splitmix64's finaliser (Steele, Lea, Flood 2014): one spreads the seed, one the
    position counted from there, so neighbouring seeds and positions give unrelated numbers.
    """
    with np.errstate(over="ignore"):  # arithmetic is modulo 2^64
        state = _mix(seeds.astype(np.uint64) + _GOLDEN)
        state = _mix(state + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    bits: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64)
    return bits * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return out
