"""Keys and values in 8 bits: what is written, and what attention makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.backends import backends

from rollout import kernels
from rollout.kernels.kv_codes import LARGEST, to_codes

KINDS = tuple(LARGEST)
FINEST = {torch.int8: 0.5, torch.float8_e4m3fn: 2**-10}  # of a scale: half of the least step


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_codes_are_near_what_they_stand_for(kind: torch.dtype) -> None:
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)) * 300
    x[0] = 0
    x[1] *= 1e-20
    codes, scales = to_codes(x, kind)
    found, step = codes.float() * scales[..., None], FINEST[kind] * scales[..., None] * 1.0001
    relative = 0.0 if kind == torch.int8 else 1 / 16
    assert ((found - x).abs() <= torch.maximum(step, relative * x.abs())).all()
    assert codes.dtype == kind
    assert (codes[1:].float().abs().amax(-1) == LARGEST[kind]).all()
    assert not found[0].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's
def test_what_is_not_finite_is_seen_by_attention(kind: torch.dtype, bad: float) -> None:
    """Of its own head alone."""
    for name, store in backends(kernels.rope_and_cache).items():
        q, k, v, cos, sin, pages, slots = _tokens(4, torch.float32, kind)
        v[2, 1, 5] = bad
        store(q, k, v, cos, sin, *pages[:2], slots, *pages[2:])
        places = [torch.tensor(x, dtype=torch.int32) for x in ([0, 4], [4], [[0]])]
        for attend in backends(kernels.paged_attention).values():
            out = attend(q, *pages[:2], *places, 0.1, 0, 0.0, None, *pages[2:])
            heads = out.isfinite().all(-1)  # [tokens, heads]
            assert heads[:, :3].all(), name
            assert not heads[2:, 3:].any(), name


@pytest.mark.parametrize("dim", [7, 64, 80, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_implementation_writes_the_codes_of_the_reference(
    kind: torch.dtype, dtype: torch.dtype, dim: int
) -> None:
    """Turned and untouched elements, normalised or not, with values and without."""
    for op in (kernels.rope_and_cache, kernels.norm_rope_and_cache):
        for values in (True, False):
            if not values and op is kernels.norm_rope_and_cache:
                continue
            outcomes: dict[str, list[Any]] = {}
            for name, run in {"wanted": op.reference, **backends(op)}.items():
                q, k, v, cos, sin, pages, slots = _tokens(9, dtype, kind, dim)
                weights = torch.linspace(0.5, 1.5, dim).to(dtype)
                norm = (weights, weights, 1e-6, None) if op is kernels.norm_rope_and_cache else ()
                caches = pages[:2] if values else (pages[0], None)
                others = pages[2:] if values else (pages[2], None)
                turned = run(
                    *(q, k, v if values else None, *norm, cos, sin, *caches, slots, *others)
                )
                outcomes[name] = [turned, *(_at(x, slots) for x in pages)]
            for name, got in outcomes.items():
                _agree(got, outcomes["wanted"], kind, exact=not norm, values=values, name=name)


def _agree(
    got: list[Any], wanted: list[Any], kind: torch.dtype, *, exact: bool, values: bool, name: str
) -> None:
    """Codes are equal, but where a norm's or a rotation's last bit moved an element over a
    boundary, to the next one.
    """
    for codes, scales, these in ((1, 3, True), (2, 4, values)):
        if not these:
            continue
        torch.testing.assert_close(got[scales], wanted[scales], rtol=2**-7, atol=0, msg=name)
        steps = (_rank(got[codes]) - _rank(wanted[codes])).abs()
        assert steps.max() <= 1, name
        assert (steps > 0).float().mean() < (0.02 if exact else 0.2), name


def _rank(codes: torch.Tensor) -> torch.Tensor:
    """Of each code among all, so that neighbours differ by one."""
    if codes.dtype == torch.int8:
        return codes.int()
    bits = codes.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_untouched_places_keep_what_they_had(kind: torch.dtype) -> None:
    for run in backends(kernels.rope_and_cache).values():
        q, k, v, cos, sin, pages, slots = _tokens(9, torch.float32, kind)
        for x in pages:
            x.view(torch.uint8).fill_(17)
        run(q, k, v, cos, sin, *pages[:2], slots, *pages[2:])
        rest = torch.tensor([s for s in range(3 * 16) if s not in slots.tolist()])
        for x in pages:
            assert (_at(x, rest).contiguous().view(torch.uint8) == 17).all()


def _tokens(count: int, dtype: torch.dtype, kind: torch.dtype, dim: int = 24) -> tuple[Any, ...]:
    """q, k, v, cos, sin, the caches and their scales, slots in order from the first block on."""
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(count, h, dim, generator=rng).to(dtype) for h in (6, 2, 2))
    width = max(2, dim // 3 * 2 // 2 * 2)
    angles = torch.rand(count, width // 2, generator=rng).repeat(1, 2)
    caches = [torch.zeros(3, 2, 16, dim).to(kind) for _ in "kv"]
    scales = [torch.zeros(3, 2, 16) for _ in "kv"]
    slots = torch.arange(count)
    return q, k, v, angles.cos(), angles.sin(), (*caches, *scales), slots


def _at(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(0, 1)[slots]
