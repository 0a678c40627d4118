"""Native ``ordered_attention``: the native ``paged_attention`` keeps one order."""

from rollout.kernels.native import library
from rollout.kernels.paged_attention.cpu import paged_attention as ordered_attention


def available() -> bool:
    return library() is not None


__all__ = ["available", "ordered_attention"]
