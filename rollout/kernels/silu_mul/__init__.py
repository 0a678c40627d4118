"""The gate of a SwiGLU feed-forward layer."""

import torch.nn.functional as F
from torch import Tensor

from rollout.kernels.op import op


@op
def silu_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up``, each rounded to ``x.dtype``.

    x: [..., 2 I], the gate in the first half; returns [..., I].
    """
    assert x.shape[-1] % 2 == 0, f"the last dimension of {x.shape} is odd"
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
