"""Both projections into a SwiGLU feed-forward layer, and its gate."""

from torch import Tensor

from rollout.kernels.linear import linear
from rollout.kernels.op import op
from rollout.kernels.silu_mul import silu_mul
from rollout.weights import Layout


@op
def gated_linear(
    x: Tensor, storage: Tensor, bias: Tensor | None, layout: Layout, shape: tuple[int, int]
) -> Tensor:
    """``silu(gate) * up`` of ``linear``, whose outputs are gate, then up; rounded as if apart.

    x: [..., K]; the weight is [2 I, K] = ``shape``, as in ``linear``; returns [..., I].
    """
    return silu_mul.reference(linear.reference(x, storage, bias, layout, shape))
