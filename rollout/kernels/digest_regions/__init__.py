"""The digests of many boxes at once, each of what its values are in a dtype."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.kernels.digest import digest
from rollout.kernels.op import op
from rollout.kernels.region_table import RegionTables
from rollout.weights import Box, Shape


@dataclass(frozen=True, slots=True)
class DigestedAs:
    """Values as ``box`` of a tensor of full ``shape`` whose elements are of ``dtype``."""

    shape: Shape
    box: Box
    dtype: torch.dtype


@op
def digest_regions(
    values: Sequence[Tensor],
    places: Sequence[DigestedAs],
    tables: RegionTables | None = None,
) -> list[tuple[int, int]]:
    """For each of ``values`` (one device, any strides) its digest once it is cast to the dtype of
    its place, and how many of those elements are NaN or infinite; see ``digest``.

    ``tables``: what was planned for regions at the same addresses before.
    """
    found = []
    for value, place in zip(values, places, strict=True):
        count = [0]
        found.append((digest(value.to(place.dtype), place.shape, place.box, count), count[0]))
    return found
