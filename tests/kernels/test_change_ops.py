"""What changed, where, and where it goes: every implementation says what plain torch says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.backends import backends

from rollout.kernels import decode_gaps, diff_update, encode_gaps, scatter_indices
from rollout.kernels.gap_codes import WIDTHS, escape
from rollout.weights import PLAIN, Box, TileLayout, WeightSlot

TAKE, ENCODE, DECODE, PLACES = map(
    backends, (diff_update, encode_gaps, decode_gaps, scatter_indices)
)
DTYPES = (torch.uint8, torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(params=TAKE)
def take(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return TAKE[request.param]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 63, 64, 65, 1000, 40_001])
@pytest.mark.parametrize("every", [1, 3, 97, 1 << 20])
def test_changes_are_those_of_the_reference_and_the_copy_takes_them(
    take, dtype, numel, every
) -> None:
    generator = torch.Generator().manual_seed(numel)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator).to(torch.uint8)
    new, bits = raw.view(dtype), INTEGERS[dtype.itemsize]
    where = torch.arange(min(2, numel), numel, every)

    def held():
        copy = new.clone()
        copy.view(bits)[where] ^= 1
        return copy

    for most in (numel, len(where)):
        copy = held()
        positions, values = take(copy, new, most)
        assert positions.dtype == torch.int64
        assert torch.equal(positions, where)
        assert torch.equal(values.view(bits), new.view(bits)[where])
        assert torch.equal(copy.view(bits), new.view(bits))
    if len(where):
        copy = held()
        assert take(copy, new, len(where) - 1) is None
        assert torch.equal(copy.view(bits), new.view(bits))


def test_nan_equals_itself_and_signs_of_zero_differ(take) -> None:
    old = torch.tensor([[float("nan"), 0.0, 1.0]] * 9)
    new = old.clone()
    new[4, 1] = -0.0
    assert take(old, new, 27)[0].tolist() == [13]


# ---- gaps ----


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 70_000), max_size=50))
def test_gaps_come_back_as_they_went(gaps) -> None:
    positions = (torch.tensor(gaps, dtype=torch.int64) + 1).cumsum(0) - 1
    numel = int(positions[-1]) + 1 if gaps else 0
    wanted, width = encode_gaps.reference(positions)
    for encode in ENCODE.values():
        codes, chosen = encode(positions)
        assert (codes.tolist(), chosen) == (wanted.tolist(), width)
    for decode in DECODE.values():
        assert torch.equal(decode(wanted, width, len(gaps), numel), positions)
        if gaps:
            assert decode(wanted, width, len(gaps), numel - 1) is None
            assert decode(wanted, width, len(gaps) - 1, numel) is None
        assert decode(wanted, width, len(gaps) + 1, numel) is None


@pytest.mark.parametrize(
    ("gap", "width"),
    [(0, 1), (254, 1), (255, 1), (3000, 2), (65_534, 2), (65_535, 2), (1 << 24, 4)],
)
def test_the_shortest_width_is_taken_and_escapes_are_exact(gap, width) -> None:
    positions = (torch.full((5,), gap + 1)).cumsum(0) - 1
    for encode in ENCODE.values():
        codes, chosen = encode(positions)
        assert chosen == width
        assert len(codes) <= 5 * 4
        for decode in DECODE.values():
            numel = int(positions[-1]) + 1
            assert torch.equal(decode(codes, chosen, 5, numel), positions)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("run", DECODE)
def test_every_width_is_decoded_with_escapes(width, run) -> None:
    codes = np.array([escape(width), escape(width), 4], f"<u{width}").view(np.uint8)
    numel = 2 * escape(width) + 5
    assert DECODE[run](torch.from_numpy(codes), width, 1, numel).tolist() == [numel - 1]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 3, 254, 255]), max_size=24),
    st.sampled_from(WIDTHS),
    st.integers(0, 12),
    st.integers(0, 2000),
)
def test_codes_that_are_anything_are_judged_alike(raw, width, count, numel) -> None:
    codes = torch.tensor(raw[: len(raw) // width * width], dtype=torch.uint8)
    wanted = decode_gaps.reference(codes, width, count, numel)
    for decode in DECODE.values():
        found = decode(codes, width, count, numel)
        assert (found is None) == (wanted is None)
        if wanted is not None:
            assert found.tolist() == wanted.tolist()
            assert all(0 <= position < numel for position in wanted.tolist())


# ---- places ----


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([PLAIN, TileLayout(16), TileLayout(4)]))
def test_places_are_those_of_the_reference(data, layout) -> None:
    rows, columns = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 12)))
    first, left = data.draw(st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1)))
    stop = data.draw(st.integers(first, rows))
    right = data.draw(st.integers(left, columns))
    take = Box((first, left), (stop, right))
    down, across = data.draw(st.tuples(st.integers(0, 20), st.integers(0, 5)))
    put = Box((down, across), (down + stop - first, across + right - left))
    slot = WeightSlot("source", (rows, columns), take, "param", put)
    shape = (64, 18)
    chosen = data.draw(st.sets(st.integers(0, rows * columns - 1)))
    positions = torch.tensor(sorted(chosen), dtype=torch.int64)
    kept, places = scatter_indices.reference(positions, slot, shape, layout)
    for run in PLACES.values():
        picked, found = run(positions, slot, shape, layout)
        assert positions[picked].tolist() == positions[kept].tolist()
        assert found.tolist() == places.tolist()


@pytest.mark.parametrize("run", PLACES)
def test_places_of_vectors_and_of_stacks(run) -> None:
    vector = WeightSlot("bias", (10,), Box((2,), (8,)), "param", Box((1,), (7,)))
    kept, places = PLACES[run](torch.tensor([0, 2, 5, 9]), vector, (20,), PLAIN)
    assert torch.tensor([0, 2, 5, 9])[kept].tolist() == [2, 5]
    assert places.tolist() == [1, 4]
    stack = WeightSlot("w", (2, 3), Box.full((2, 3)), "param", Box((4, 0, 0), (5, 2, 3)))
    _, places = PLACES[run](torch.tensor([0, 5]), stack, (6, 2, 3), PLAIN)
    assert places.tolist() == [24, 29]
