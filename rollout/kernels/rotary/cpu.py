"""Native ``rotary``: heads that are slices of a fused projection are read in place."""

import torch
from torch import Tensor

from rollout.kernels.native import BF16, entry, library
from rollout.kernels.rotary import rotary as op


def available() -> bool:
    return library() is not None


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    alike = q.dtype == k.dtype and cos.dtype == sin.dtype
    known = cos.dtype in (q.dtype, torch.float32) and q.dtype in BF16
    if not (alike and known):
        return op.reference(q, k, cos, sin)
    assert q.shape[0] == k.shape[0] == cos.shape[0], "q, k and the tables count other tokens"
    assert q.shape[2] == k.shape[2] >= cos.shape[1], "the tables are wider than a head"
    assert cos.shape == sin.shape
    assert cos.shape[1] % 2 == 0
    cos, sin = cos.contiguous(), sin.contiguous()
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    tokens, heads, dim = x.shape
    if not out.numel():
        return out
    entry("rotary", "pllpppl" + "lll" + "iii")(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        tokens * heads,
        heads,
        dim,
        cos.shape[1],
        BF16[x.dtype],
        int(cos.dtype == torch.float32),
        torch.get_num_threads(),
    )
    return out
