"""NaN and infinity are found in the pass that digests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.backends import backends
from torch import Tensor

from rollout.kernels import digest
from rollout.weights import Box, TileLayout

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BAD = (float("nan"), -float("nan"), float("inf"), -float("inf"))
IMPLEMENTATIONS = backends(digest)


@pytest.fixture(params=IMPLEMENTATIONS)
def count(request: pytest.FixtureRequest) -> Callable[..., int]:
    def counted(values: Tensor, shape: Any = None, box: Box | None = None) -> int:
        shape, found = shape or tuple(values.shape), [0]
        box = box or Box.full(shape)
        wanted = digest.reference(values, shape, box)
        assert IMPLEMENTATIONS[request.param](values, shape, box, found) == wanted
        assert IMPLEMENTATIONS[request.param](values, shape, box) == wanted
        return found[0]

    return counted


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_bad_value_is_counted_wherever_it_lies(
    count: Callable[..., int], dtype: torch.dtype
) -> None:
    values = (torch.randn(3, 771) * 0.02).to(dtype)
    assert count(values) == 0
    for turn, place in enumerate((0, 1, 63, 64, 511, 512, 767, 768, 770)):
        one = values.clone()
        one[turn % 3, place] = BAD[turn % 4]
        assert count(one) == 1, place
    values[:, ::7] = float("nan")
    assert count(values) == 3 * 111
    assert count(values[:, 1:7], (3, 771), Box((0, 1), (3, 7))) == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_values_beside_small_ones_are_no_bad_ones(
    count: Callable[..., int], dtype: torch.dtype
) -> None:
    """All bits of the exponent are set among them, but in none of them."""
    largest = torch.finfo(dtype)
    some = [largest.max, largest.tiny, -1.5, 0.75, 3.0, largest.min] * 200
    values = torch.tensor(some, dtype=torch.float64)
    assert count(values.to(dtype)) == 0


def test_strides_tiles_and_many_pieces_are_looked_at(count: Callable[..., int]) -> None:
    values = torch.zeros(6, 9, dtype=torch.bfloat16)
    values[3, 5] = values[5, 8] = float("inf")
    assert count(values.T) == count(values) == 2
    assert count(values[::3, 1::4], (2, 2)) == 1
    layout, shape = TileLayout(16), (32, 8)
    storage = torch.zeros(layout.storage_shape(shape), dtype=torch.bfloat16)
    logical = torch.zeros(shape, dtype=torch.bfloat16)
    logical[17, 5] = logical[31, 0] = float("nan")
    layout.write(storage, shape, Box.full(shape), logical)
    view = layout.view(storage, shape, Box.full(shape), shape, Box.full(shape))
    assert count(*view) == 2


def test_integers_and_float8_have_none(count: Callable[..., int]) -> None:
    for dtype in (torch.int8, torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn):
        assert count(torch.full((300,), -1).to(dtype)) == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_counts_of_threads_add_up(threads: int, set_threads: Callable[[int], None]) -> None:
    set_threads(threads)
    values = torch.ones(1000, 300, dtype=torch.bfloat16)
    values[::100, 7] = float("nan")
    found = [5]
    digest(values, (1000, 300), Box.full((1000, 300)), found)
    assert found == [15]
