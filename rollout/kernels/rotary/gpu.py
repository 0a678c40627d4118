"""Triton ``rotary``: the kernel of ``rotary_store`` with dense results."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels.rotary import rotary as op
from rollout.kernels.rotary_store.gpu import takes, turn


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if not takes(q, k, cos, sin):
        return op.reference(q, k, cos, sin)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    turn(q, k, k, cos, sin, q_out, k_out, k_out, k_out, 0)
    return q_out, k_out
