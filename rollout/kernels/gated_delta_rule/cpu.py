"""Native ``gated_delta_rule``."""

import ctypes

import torch
from torch import Tensor

from rollout.kernels.gated_delta_rule import EPS
from rollout.kernels.gated_delta_rule import gated_delta_rule as op
from rollout.kernels.native import BF16, entry
from rollout.kernels.native.prototypes import structure
from rollout.kernels.op import in_rows

MAX_KEY = 512  # as in delta.c


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    betas: Tensor,
    states: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
) -> Tensor:
    bf16, (tokens, heads, dim) = BF16.get(v.dtype), v.shape
    key_heads, key_dim = k.shape[1:]
    alike = q.dtype == k.dtype == v.dtype and states.dtype == torch.float32
    given = q, k, v, gates, betas, states, slots, query_starts, context_lens
    if bf16 is None or not (alike and states.is_contiguous()) or key_dim > MAX_KEY:
        return op.reference(*given)
    assert q.shape == k.shape == (tokens, key_heads, key_dim)
    assert heads % key_heads == 0
    assert states.shape[1:] == (heads, key_dim, dim)
    assert betas.shape == (tokens, heads)
    assert gates.shape in (betas.shape, (tokens, heads, key_dim))
    assert len(slots) == len(context_lens) == len(query_starts) - 1
    q, k, v = (in_rows(x) for x in (q, k, v))
    gates, betas = gates.float().contiguous(), betas.float().contiguous()
    slots, starts, lengths = (i.int().contiguous() for i in (slots, query_starts, context_lens))
    out = torch.empty(v.shape, dtype=v.dtype)
    problem = structure("Delta")(
        *(x.data_ptr() for x in (q, k, v, out, gates, betas, states, slots, starts, lengths)),
        *(q.stride(0), k.stride(0), v.stride(0), len(slots), key_heads, heads, key_dim, dim),
        gates.dim() == 3,
        *(key_dim**-0.5, EPS),
    )
    if entry("gated_delta_rule")(ctypes.addressof(problem), bf16, torch.get_num_threads()):
        return op.reference(*given)  # there is padding
    return out
