"""What slots hold goes to other slots, in all layers."""

from torch import Tensor

from rollout.kernels.op import op


@op
def copy_slots(states: Tensor, pairs: Tensor) -> None:
    """``states[:, to] = states[:, source]`` in place, for each (source, to) of ``pairs``.

    states: [layers, slots, ...], dense, of any dtype; pairs: int64 [n, 2], of which no slot is in
    both columns, and none is copied to twice.
    """
    source, target = pairs.unbind(1)
    for layer in states:  # one after the other: a copy of the slots lies between
        layer[target] = layer[source]
