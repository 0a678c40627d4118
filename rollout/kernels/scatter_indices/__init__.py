"""Where the changed elements of a checkpoint tensor lie in a rank's memory."""

from torch import Tensor

from rollout.kernels.op import op
from rollout.weights import Layout, Shape, WeightSlot
from rollout.weights.positions import Kept, positions_in_whole, positions_inside


@op
def scatter_indices(
    positions: Tensor, slot: WeightSlot, shape: Shape, layout: Layout
) -> tuple[Kept, Tensor]:
    """Which ``positions`` fall into the slot, and their flat places in its parameter's storage.

    positions: int64, ascending, row-major in the slot's source. ``shape``: the logical one of the
    parameter, which lies in memory by ``layout``. The first result indexes ``positions`` (and their
    values); the second is int64, as long as what it picks.
    """
    kept, inside = positions_inside(slot.take, slot.shape, positions)
    return kept, layout.places(shape, positions_in_whole(inside, slot.put, shape))
