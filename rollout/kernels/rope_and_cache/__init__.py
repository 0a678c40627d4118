"""Rotary position embedding of new queries and keys, and their way into the KV cache, in one."""

from collections.abc import Container

import torch
from torch import Tensor

from rollout.kernels.kv_codes import are_pages, to_codes
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
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """Rotate q and k, write k and v into their pages; returns the rotated q, dense.

    q: [T, H, D]; k, v: [T, KH, D]; cos, sin: [T, R], R even and at most D, both halves alike
    (``cat(freqs, freqs)``), in ``q.dtype`` or float32. The first R dimensions of a head turn,
    dimension i paired with i + R/2: ``x * cos + rotate_half(x) * sin`` in the wider of the two
    dtypes, each operation rounded to it. k_cache, v_cache: [blocks, KH, block, D] of the same
    dtype, in which ``cache[slot // block, :, slot % block]`` is a token's; slots: [T] int64,
    distinct, each below blocks * block. v and v_cache are None where values are a part of the keys
    (latent attention). ``k_scales``, ``v_scales``: float32 [blocks, KH, block], where the caches
    are of a dtype of ``kv_codes.LARGEST``: each head's codes go to its page, and its scale to
    theirs. The Triton implementation passes over tokens whose slot is
    negative: the padding of a captured graph.
    """
    assert q.shape[0] == k.shape[0] == cos.shape[0] == sin.shape[0] == slots.shape[0]
    assert q.shape[2] == k.shape[2] == k_cache.shape[3] >= cos.shape[1] == sin.shape[1]
    assert cos.shape[1] % 2 == 0
    assert k_cache.shape[1] == k.shape[1]
    block = k_cache.shape[2]
    pages, offsets = slots // block, slots % block
    store(_rotate(k, cos, sin), k_cache, k_scales, pages, offsets)
    if v is not None and v_cache is not None:
        assert k.shape == v.shape
        assert k_cache.shape == v_cache.shape
        store(v, v_cache, v_scales, pages, offsets)
    return _rotate(q, cos, sin)


def store(x: Tensor, cache: Tensor, scales: Tensor | None, pages: Tensor, offsets: Tensor) -> None:
    """x [T, KH, D] to its places, as codes where there are ``scales``."""
    if scales is not None:
        x, scales[pages, :, offsets] = to_codes(x, cache.dtype)
    cache[pages, :, offsets] = x


def is_for_kernel(
    dtypes: Container[torch.dtype],
    q: Tensor,
    k: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> bool:
    """Whether a kernel for ``dtypes`` takes these, whose shapes must fit; else the reference does.

    values, v_pages, v_scales: k, k_cache and k_scales again where there are no values.
    """
    tokens, _, dim = q.shape
    assert k.shape == values.shape == (tokens, k_cache.shape[1], dim), (
        f"{k.shape} {values.shape} for {q.shape}"
    )
    assert k_cache.shape == v_pages.shape
    assert k_cache.shape[3] == dim >= cos.shape[1], "the tables are wider than a head"
    assert cos.shape == sin.shape
    assert len(cos) == tokens
    assert cos.shape[1] % 2 == 0
    assert slots.shape == (tokens,)
    alike = q.dtype == k.dtype == values.dtype and k_cache.dtype == v_pages.dtype
    tables = cos.dtype == sin.dtype and cos.dtype in (q.dtype, torch.float32)
    pages = are_pages(q.dtype, k_cache, k_scales) and are_pages(q.dtype, v_pages, v_scales)
    return alike and tables and pages and q.dtype in dtypes


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[1]
    head, rest = x[..., :width], x[..., width:]
    first, second = head.chunk(2, dim=-1)
    half = torch.cat((-second, first), dim=-1)
    turned = (head * cos[:, None] + half * sin[:, None]).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
