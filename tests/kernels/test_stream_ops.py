"""Copies past the caches: every implementation writes what plain torch writes, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.backends import backends
from torch import Tensor

from rollout.kernels import copy_into_box, nontemporal_copy
from rollout.kernels.copy_into_box import cpu as native_write
from rollout.kernels.nontemporal_copy import cpu as native_copy
from rollout.weights import PLAIN, Box, Layout, TileLayout

COPY, WRITE = map(backends, (nontemporal_copy, copy_into_box))
DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


@pytest.fixture(autouse=True, params=[1, 2], ids=["one_thread", "two_threads"])
def of_any_size(request, monkeypatch, set_threads) -> None:
    """Small tensors take the way of large ones."""
    monkeypatch.setattr(native_copy, "LEAST", 1)
    monkeypatch.setattr(native_copy, "_LEAST_ROW", 1)
    monkeypatch.setattr(native_write, "LEAST", 1)
    set_threads(request.param)


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("copy", COPY.values(), ids=COPY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 31, 63, 64, 65, 4097, 300_001])
@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 3), (33, 7)], ids=str)
def test_a_stretch_anywhere(copy, dtype, numel, offsets) -> None:
    to, at = offsets
    values = noise((at + numel,), dtype)[at:]
    whole = noise((to + numel + 70,), dtype, 1)
    wanted = whole.clone()
    wanted[to : to + numel] = values
    into = whole[to : to + numel]
    assert copy(into, values) is into
    assert torch.equal(bits(whole), bits(wanted))


@pytest.mark.parametrize("copy", COPY.values(), ids=COPY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 100), (3, 33), (1, 4), (5, 1), (2, 3, 40)], ids=str)
def test_rows_and_other_strides(copy, dtype, shape) -> None:
    doubled = (*shape[:-1], 2 * shape[-1])
    for values in (
        noise(doubled, dtype)[..., : shape[-1]],
        noise(doubled, dtype)[..., ::2],
        noise(tuple(reversed(shape)), dtype).permute(*reversed(range(len(shape)))),
        noise((1, *shape[1:]), dtype).expand(shape),
    ):
        whole = noise(doubled, dtype, 1)
        wanted = whole.clone()
        wanted[..., shape[-1] :] = values
        copy(whole[..., shape[-1] :], values)
        assert torch.equal(bits(whole), bits(wanted))


def test_other_dtypes_are_cast() -> None:
    values, into = torch.randn(500), torch.empty(500, dtype=torch.bfloat16)
    for copy in COPY.values():
        assert torch.equal(copy(into, values), values.bfloat16())


def random_box(rng: random.Random, shape: tuple[int, ...], units: tuple[int, ...]) -> Box:
    edges = [sorted(rng.sample(range(n // u + 1), 2)) for n, u in zip(shape, units, strict=True)]
    pairs = list(zip(edges, units, strict=True))
    return Box(tuple(e[0] * u for e, u in pairs), tuple(e[1] * u for e, u in pairs))


@pytest.mark.parametrize("write", WRITE.values(), ids=WRITE)
@pytest.mark.parametrize("layout", [PLAIN, TileLayout(16), TileLayout(8)], ids=["plain", "16", "8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("units", [(16, 2), (16, 1), (1, 2), (1, 1)], ids=str)
def test_a_box_of_a_parameter(write: Callable[..., Any], layout: Layout, dtype, units) -> None:
    shape = (96, 150)
    rng = random.Random(0)
    boxes = [Box.full(shape), *(random_box(rng, shape, units) for _ in range(8))]
    for box in boxes:
        storage = noise(layout.storage_shape(shape), dtype, 1)
        wide = noise((box.shape[0], box.shape[1] + 3), dtype, 2)
        for value in (
            noise(box.shape, dtype),
            wide[:, : box.shape[1]],
            wide[:, 1 : 1 + box.shape[1]],
            noise(box.shape, dtype).reshape(-1),
            torch.randn(box.shape, dtype=torch.float64),
        ):
            got, wanted = storage.clone(), storage.clone()
            layout.write(wanted, shape, box, value)
            write(got, shape, box, value, layout)
            assert torch.equal(bits(got), bits(wanted)), box


def test_large_boxes_are_written_by_native_code(monkeypatch) -> None:
    """Or the tests above compare the reference with itself."""
    if "cpu" not in WRITE:
        pytest.skip("no native kernels here")
    monkeypatch.setattr(copy_into_box, "reference", None)
    monkeypatch.setattr(nontemporal_copy, "reference", None)
    shape = (64, 40)
    for layout in (PLAIN, TileLayout(16)):
        storage = torch.empty(layout.storage_shape(shape), dtype=torch.bfloat16)
        WRITE["cpu"](storage, shape, Box.full(shape), noise(shape, torch.bfloat16), layout)
