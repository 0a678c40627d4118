"""Rotary position embedding of new queries and keys, and their way into the KV cache, in one."""

import torch
from torch import Tensor

from rollout.kernels.op import op


@op
def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slots: Tensor,
) -> Tensor:
    """Rotate q and k, write k and v into their pages; returns the rotated q, dense.

    q: [T, H, D]; k, v: [T, KH, D]; cos, sin: [T, R], R even and at most D, both halves alike
    (``cat(freqs, freqs)``), in ``q.dtype`` or float32. The first R dimensions of a head turn,
    dimension i paired with i + R/2: ``x * cos + rotate_half(x) * sin`` in the wider of the two
    dtypes, each operation rounded to it. k_cache, v_cache: [blocks, KH, block, D] of the same
    dtype, in which ``cache[slot // block, :, slot % block]`` is a token's; slots: [T] int64,
    distinct, each below blocks * block. v and v_cache are None where values are a part of the keys
    (latent attention). The Triton implementation passes over tokens whose slot is
    negative: the padding of a captured graph.
    """
    assert q.shape[0] == k.shape[0] == cos.shape[0] == sin.shape[0] == slots.shape[0]
    assert q.shape[2] == k.shape[2] == k_cache.shape[3] >= cos.shape[1] == sin.shape[1]
    assert cos.shape[1] % 2 == 0
    assert k_cache.shape[1] == k.shape[1]
    block = k_cache.shape[2]
    pages, offsets = slots // block, slots % block
    k_cache[pages, :, offsets] = _rotate(k, cos, sin)
    if v is not None and v_cache is not None:
        assert k.shape == v.shape
        assert k_cache.shape == v_cache.shape
        v_cache[pages, :, offsets] = v
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[1]
    head, rest = x[..., :width], x[..., width:]
    first, second = head.chunk(2, dim=-1)
    half = torch.cat((-second, first), dim=-1)
    turned = (head * cos[:, None] + half * sin[:, None]).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
