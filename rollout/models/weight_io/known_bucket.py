"""A bucket that was read in place before: when it comes again, nothing of it is looked up anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.models.weight_io.load import LoadPlan

ALIGNED = 16  # bytes: the longest element of any dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBucket:
    """Tensors and boxes in regions of the sender's memory, each checked when they came first.

    ``entries``: of the header, the same object whenever it comes again. ``sizes``: bytes of each
    region. ``lies``: of each value its region, the first of its elements there, and its strides.
    """

    entries: object
    sizes: Sequence[int]
    lies: Sequence[tuple[int, int, list[int]]]
    dtypes: Sequence[torch.dtype]
    plan: LoadPlan

    def values(self, regions: Sequence[Tensor]) -> list[Tensor] | None:
        """The values in regions of today; None where those are not as they were."""
        if len(regions) != len(self.sizes):
            return None
        found = []
        elements: dict[tuple[int, torch.dtype], Tensor] = {}  # regions as ones of a dtype
        for (index, first, strides), dtype, shape in zip(
            self.lies, self.dtypes, self.plan.shapes, strict=True
        ):
            region = regions[index]
            if region.dtype == dtype and region.shape == shape:
                found.append(region)  # the value itself
                continue
            if (whole := elements.get((index, dtype))) is None:
                if not self._is_flat(region, index):
                    return None
                if over := region.numel() % dtype.itemsize:
                    region = region[:-over]
                whole = elements[index, dtype] = region.view(dtype)
            at = whole.storage_offset() + first
            found.append(whole.as_strided(shape, strides, at))
        return found

    def _is_flat(self, region: Tensor, index: int) -> bool:
        """Whether a region is bytes, as long as it was, and aligned for every dtype."""
        flat = region.dtype == torch.uint8 and region.stride() == (1,)
        return flat and region.numel() == self.sizes[index] and region.data_ptr() % ALIGNED == 0
