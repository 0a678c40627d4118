"""Many copies at once, each with its own cast."""

from collections.abc import Sequence

from torch import Tensor

from rollout.kernels.op import op
from rollout.kernels.region_table import RegionTables


@op
def copy_regions(
    targets: Sequence[Tensor], sources: Sequence[Tensor], tables: RegionTables | None = None
) -> None:
    """``targets[i] <- sources[i]``, of one shape, any strides and dtypes; each value cast once.

    All of them on one device; no target shares a byte with another region. ``tables``: what was
    planned for regions at the same addresses before.
    """
    for target, source in zip(targets, sources, strict=True):
        assert target.shape == source.shape, f"{target.shape} and {source.shape} differ"
        target.copy_(source)
