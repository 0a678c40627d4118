"""The digest: its wire format, its additivity, and the faults it must see."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from kernels.backends import backends
from torch import Tensor

from rollout.kernels import digest, digest_cells
from rollout.weights import Box, Shape, TileLayout
from rollout.weights.cells import CellGrid

IMPLEMENTATIONS = backends(digest)
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int64,
    torch.float64,
)
SHAPES: tuple[Shape, ...] = ((), (1,), (0,), (3, 0, 2), (17,), (5, 33), (4, 1, 7), (3, 4, 5, 6))


@pytest.fixture(params=IMPLEMENTATIONS)
def run(request: pytest.FixtureRequest) -> Callable[[Tensor, Shape, Box], int]:
    return IMPLEMENTATIONS[request.param]


def test_the_wire_format_is_the_documented_one(run: Callable[..., int]) -> None:
    """Computed here with Python's integers, and held against constants for ever."""
    values = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, -0.0]])
    mask = 2**64 - 1

    def fold(x: int) -> int:
        return ((x & 0xFFFFFFFF) * (x >> 32) + x) & mask

    def mix(position: int, bits: int) -> int:
        return fold(fold(((position + 1) * 0x9E3779B97F4A7C15 + bits) & mask))

    bits = values.view(torch.int32).flatten().tolist()
    wanted = sum(mix(p, b & 0xFFFFFFFF) for p, b in enumerate(bits)) & mask
    assert run(values, (2, 3), Box.full((2, 3))) == wanted == GOLDEN_FLOAT32
    assert run(torch.tensor([0], dtype=torch.uint8), (1,), Box.full((1,))) == 0x363EDCF6057EBD2C


GOLDEN_FLOAT32 = 0x7796F650E65A14B6


@pytest.mark.parametrize(("before", "after"), [(0.0, -0.0), (1.0, -1.0), (1.0, 1.0078125)])
@pytest.mark.parametrize("stride", [0, 1, 896])
def test_no_two_equal_and_opposite_changes_cancel(before: float, after: float, stride: int) -> None:
    """One element changes at p (and back at p + stride): of a million positions, no two changes of
    the digest are equal, so none would hide another that is opposite."""
    positions = torch.arange(1 << 20)

    def bits(value: float) -> Tensor:
        values = torch.full((positions.numel(),), value, dtype=torch.bfloat16)
        return values.view(torch.int16).long() & 0xFFFF

    def fold(x: Tensor) -> Tensor:
        return (x & 0xFFFFFFFF) * ((x >> 32) & 0xFFFFFFFF) + x

    def mix(value: float) -> Tensor:
        return fold(fold((positions + 1) * (0x9E3779B97F4A7C15 - 2**64) + bits(value)))

    many = torch.full(positions.shape, after, dtype=torch.bfloat16)
    whole = digest(many, tuple(many.shape), Box.full(tuple(many.shape)))
    assert int(mix(after).sum()) % 2**64 == whole
    change = mix(after) - mix(before)
    if stride:
        change = change[stride:] - change[:-stride]
    assert change.unique().numel() == change.numel()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_over_random_partitions_equal_the_whole(
    run: Callable[..., int], dtype: torch.dtype, shape: Shape
) -> None:
    values = _values(shape, dtype)
    whole = digest.reference(values, shape, Box.full(shape))
    assert run(values, shape, Box.full(shape)) == whole
    slow = run is IMPLEMENTATIONS.get("triton")  # in the interpreter
    for seed in range(1 if slow else 3):
        boxes = list(_partition(Box.full(shape), random.Random(seed)))
        parts = [run(values[box.slices], shape, box) for box in boxes]
        assert sum(parts) % 2**64 == whole
        if slow:
            continue
        copies = [run(values[box.slices].clone(), shape, box) for box in boxes]
        assert copies == parts


def test_every_stride_is_read_in_place(run: Callable[..., int]) -> None:
    values = _values((6, 8, 10), torch.bfloat16)
    views = (values.transpose(0, 2), values[::2, 1::3, ::2], values.permute(1, 0, 2))
    views += (
        values[:, :, 3:4],
        values[2:3],
        values.expand(2, 6, 8, 10),
        values[1, 2].expand(4, 10),
    )
    for view in views:
        shape = tuple(view.shape)
        wanted = digest.reference(view.contiguous(), shape, Box.full(shape))
        assert run(view, shape, Box.full(shape)) == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_faults_change_the_digest(dtype: torch.dtype) -> None:
    """Of one implementation: the others give the same."""
    shape = (37, 64)
    values = _values(shape, dtype)
    seen = {digest(values, shape, Box.full(shape))}
    count = 1
    for faulty in _faults(values):
        assert not torch.equal(faulty.view(torch.uint8), values.view(torch.uint8))
        seen.add(digest(faulty, shape, Box.full(shape)))
        count += 1
    assert len(seen) == count
    assert count > 300


def test_large_tensors_agree_for_any_number_of_threads(set_threads: Callable[[int], None]) -> None:
    values = _values((1000, 3000), torch.bfloat16)
    shape, box = (2000, 4000), Box((10, 20), (1010, 3020))
    wanted = digest.reference(values, shape, box)
    for count in (1, 2, 3):
        set_threads(count)
        assert digest(values, shape, box) == wanted


def test_positions_beyond_32_bits_are_told_apart(run: Callable[..., int]) -> None:
    values, shape = torch.ones(2, 3), (1 << 20, 1 << 20)
    at = [Box((row, column), (row + 2, column + 3)) for row in (0, 1 << 19) for column in (0, 77)]
    assert len({run(values, shape, box) for box in at}) == 4
    assert all(run(values, shape, b) == digest.reference(values, shape, b) for b in at)


def test_a_box_that_does_not_fit_is_refused(run: Callable[..., int]) -> None:
    with pytest.raises(AssertionError):
        run(torch.ones(2, 2), (3, 3), Box((0, 0), (2, 3)))
    with pytest.raises(AssertionError):
        run(torch.ones(2, 2), (3, 3), Box((2, 2), (4, 4)))


def _values(shape: Shape, dtype: torch.dtype) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    size = dtype.itemsize
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=rng)
    if dtype == torch.bool:
        return raw[..., 0] > 127
    return raw.view(dtype).reshape(shape)


def _partition(box: Box, rng: random.Random) -> Iterator[Box]:
    """Cut at random places along random dimensions."""
    cuttable = [d for d, size in enumerate(box.shape) if size > 1]
    if not cuttable or rng.random() < 0.15:
        yield box
        return
    dim = rng.choice(cuttable)
    cut = rng.randrange(box.starts[dim] + 1, box.stops[dim])
    stops = (*box.stops[:dim], cut, *box.stops[dim + 1 :])
    starts = (*box.starts[:dim], cut, *box.starts[dim + 1 :])
    yield from _partition(Box(box.starts, stops), rng)
    yield from _partition(Box(starts, box.stops), rng)


def _faults(values: Tensor) -> Iterator[Tensor]:
    """Edits that a plain sum, or a sum of position times bits, would miss or often miss."""
    rng, total = random.Random(0), values.numel()
    for _ in range(100):
        i, j = rng.sample(range(total), 2)
        yield _edited(values, lambda flat, i=i, j=j: flat[[i, j]].neg(), [i, j])
        if flat_bits(values, i) != flat_bits(values, j):
            yield _edited(values, lambda flat, i=i, j=j: flat[[j, i]], [i, j])
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize]
    for bit in range(8 * values.dtype.itemsize):
        flipped = values.clone()
        word = flipped.view(integers).view(-1)
        word[total // 2 + bit] ^= -(2**bit) if bit == 8 * values.dtype.itemsize - 1 else 2**bit
        yield flipped
    for i in rng.sample(range(total), 100):
        if flat_bits(values, i):
            yield _edited(values, lambda flat, i=i: flat[[i]] * 0, [i])
    yield values.roll(1, 0)
    yield values.roll(1, 1)
    yield values.flatten().roll(1).view(values.shape)
    yield values.flip(0)
    yield torch.zeros_like(values)


def flat_bits(values: Tensor, i: int) -> bytes:
    return bytes(values.view(torch.uint8).view(-1, values.dtype.itemsize)[i].tolist())


def _edited(values: Tensor, edit: Callable[[Tensor], Tensor], at: list[int]) -> Tensor:
    out = values.clone()
    out.view(-1)[at] = edit(values.view(-1))
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("box", "take"),
    [
        (Box((0, 0), (48, 12)), Box((16, 6), (64, 18))),  # all tiles, inside a larger source
        (Box((16, 0), (48, 12)), Box((32, 0), (64, 12))),
        (Box((16, 0), (32, 12)), Box((0, 8), (16, 20))),  # one tile
        (Box((0, 4), (32, 10)), Box((0, 8), (32, 14))),  # some of each row
        (Box((3, 0), (30, 12)), Box((5, 2), (32, 14))),  # cut tiles: through a copy
    ],
    ids=str,
)
def test_tiles_have_the_digest_of_their_logical_values(
    run: Callable[..., int], dtype: torch.dtype, box: Box, take: Box
) -> None:
    shape, whole, layout = (48, 12), (80, 24), TileLayout(16)
    logical = torch.randn(shape).to(dtype)
    storage = torch.zeros(layout.storage_shape(shape), dtype=dtype)
    layout.write(storage, shape, Box.full(shape), logical)
    values, finer, where = layout.view(storage, shape, box, whole, take)
    assert run(values, finer, where) == digest.reference(logical[box.slices], whole, take)


def test_a_view_of_whole_tiles_copies_nothing() -> None:
    layout, shape = TileLayout(16), (64, 48)
    storage = torch.zeros(layout.storage_shape(shape), dtype=torch.bfloat16)
    box = Box((16, 0), (64, 48))
    values, _, _ = layout.view(storage, shape, box, shape, box)
    storage += 1
    assert values.sum() == box.numel


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int32, torch.float32])
@pytest.mark.parametrize(
    ("shape", "cell"),
    [((300, 200), (128, 128)), ((7, 64), (1, 32)), ((5, 33), (1, 33)), ((9, 6), (9, 6))],
)
@pytest.mark.parametrize("by", backends(digest_cells))
def test_cells_have_the_digests_of_their_boxes(dtype, shape, cell, by) -> None:
    """Also those that reach beyond the matrix."""
    matrix = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    if dtype.is_floating_point:
        matrix[-1, -3:] = float("nan")
    grid = CellGrid(shape, *cell)
    assert torch.equal(grid.holding(torch.arange(matrix.numel())), torch.arange(grid.count))
    numbers = torch.arange(0, grid.count, 2)
    cells, corners = grid.gather(matrix, numbers), grid.corners(numbers)
    sums, bad = backends(digest_cells)[by](cells, corners, shape)
    assert sums.dtype == bad.dtype == torch.int64
    for one, (top, left), found, count in zip(cells, corners.tolist(), sums, bad, strict=True):
        box = Box((top, left), (min(top + cell[0], shape[0]), min(left + cell[1], shape[1])))
        nonfinite = [0]
        assert int(found) % 2**64 == digest(matrix[box.slices], shape, box, nonfinite)
        assert int(count) == nonfinite[0]
        assert torch.equal(one[: box.shape[0], : box.shape[1]], matrix[box.slices]) or count
