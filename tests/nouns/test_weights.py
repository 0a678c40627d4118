"""Boxes and layouts: a layout is a bijection, whatever box is written or read."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.weights import PLAIN, Box, TileLayout

LAYOUTS = [PLAIN, TileLayout(4), TileLayout(16)]


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    sides = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape]
    return st.tuples(*sides).map(lambda s: Box(tuple(a for a, _ in s), tuple(b for _, b in s)))


@given(boxes((7, 5)), boxes((7, 5)))
def test_the_intersection_holds_exactly_the_common_elements(a: Box, b: Box) -> None:
    grid = torch.zeros(7, 5, dtype=torch.int64)
    grid[a.slices] += 1
    grid[b.slices] += 1
    common = a.intersect(b)
    assert (grid == 2).sum() == (common.numel if common else 0)
    if common:
        assert (grid[common.slices] == 2).all()


def test_a_box_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match="not a box"):
        Box((2,), (1,))


@given(st.sampled_from(LAYOUTS), boxes((16, 12)), boxes((16, 12)))
def test_a_layout_reads_back_what_was_written_box_by_box(layout, put: Box, look: Box) -> None:
    shape = (16, 12)
    logical = torch.arange(192.0).reshape(shape)
    storage = torch.zeros(layout.storage_shape(shape))
    layout.write(storage, shape, Box.full(shape), logical)
    value = -torch.arange(float(put.numel)).reshape(put.shape) - 1
    layout.write(storage, shape, put, value)
    logical[put.slices] = value
    assert torch.equal(layout.read(storage, shape, look), logical[look.slices])


@given(st.sampled_from(LAYOUTS), st.sets(st.integers(0, 191)))
def test_a_patch_overwrites_only_its_positions(layout, positions: set[int]) -> None:
    shape = (16, 12)
    logical = torch.arange(192.0).reshape(shape)
    storage = torch.zeros(layout.storage_shape(shape))
    layout.write(storage, shape, Box.full(shape), logical)
    where = torch.tensor(sorted(positions), dtype=torch.int64)
    storage.view(-1)[layout.places(shape, where)] = where.float() - 1000
    logical.view(-1)[where] = where.float() - 1000
    assert torch.equal(layout.read(storage, shape, Box.full(shape)), logical)


def test_a_shape_that_does_not_divide_into_tiles_is_refused() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        TileLayout(16).storage_shape((17, 4))
