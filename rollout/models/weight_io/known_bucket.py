"""A bucket that was read in place before: when it comes again, nothing of it is looked up anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.models.weight_io.load import WholePlan

ALIGNED = 16  # bytes: the longest element of any dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBucket:
    """Whole tensors in regions of the sender's memory, each checked when they came first.

    ``entries``: of the header, the same object whenever it comes again. ``sizes``: bytes of each
    region. ``lies``: of each tensor its region, its first byte there, and behind its last.
    """

    entries: object
    sizes: Sequence[int]
    lies: Sequence[tuple[int, int, int]]
    dtypes: Sequence[torch.dtype]
    plan: WholePlan

    def values(self, regions: Sequence[Tensor]) -> list[Tensor] | None:
        """The tensors in regions of today; None where those are not as they were."""
        if len(regions) != len(self.sizes):
            return None
        found = []
        for (index, start, stop), dtype, shape in zip(
            self.lies, self.dtypes, self.plan.shapes, strict=True
        ):
            region = regions[index]
            if region.dtype == dtype and region.shape == shape:
                found.append(region)  # the tensor itself
                continue
            flat = region.dtype == torch.uint8 and region.stride() == (1,)
            if not flat or region.numel() != self.sizes[index] or region.data_ptr() % ALIGNED:
                return None
            found.append(region[start:stop].view(dtype).view(shape))
        return found
