"""Putting values into a parameter, however it lies in memory."""

from torch import Tensor

from rollout.kernels.op import op
from rollout.weights import Box, Layout, Shape


@op
def copy_into_box(storage: Tensor, shape: Shape, box: Box, value: Tensor, layout: Layout) -> None:
    """Write ``value``, of any float dtype, as ``box`` of the logical parameter of ``shape``.

    It lies in ``storage`` by ``layout``; nothing outside the box changes.
    """
    layout.write(storage, shape, box, value)
