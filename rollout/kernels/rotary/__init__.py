"""Rotary position embedding."""

import torch
from torch import Tensor

from rollout.kernels.op import op


@op
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R dimensions of each head, pairing dimension i with i + R/2.

    q: [T, H, D]; k: [T, KH, D]; cos, sin: [T, R], R even and at most D, both halves alike
    (``cat(freqs, freqs)``), in ``q.dtype`` or float32. ``x * cos + rotate_half(x) * sin`` is taken
    in the wider of the two dtypes, each operation rounded to it; dimensions from R on pass through.
    """
    assert q.shape[0] == k.shape[0] == cos.shape[0] == sin.shape[0]
    assert q.shape[2] == k.shape[2] >= cos.shape[1] == sin.shape[1]
    assert cos.shape[1] % 2 == 0
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[1]
    head, rest = x[..., :width], x[..., width:]
    first, second = head.chunk(2, dim=-1)
    half = torch.cat((-second, first), dim=-1)
    turned = (head * cos[:, None] + half * sin[:, None]).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
