"""Copying much more than the caches hold."""

from torch import Tensor

from rollout.kernels.op import op


@op
def nontemporal_copy(into: Tensor, values: Tensor) -> Tensor:
    """``into.copy_(values)``, of equal shapes; returns ``into``.

    What is written is not expected to be read again soon. The two do not overlap, and autograd
    does not record it.
    """
    return into.copy_(values)
