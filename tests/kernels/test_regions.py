"""Copies and digests of many regions in few launches give what one after the other gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernels.sanitizer import Launch
from torch import Tensor

from rollout.errors import WeightMismatch
from rollout.kernels import DigestedAs, copy_regions, digest, digest_regions
from rollout.kernels.region_table import MOST_ROWS, RegionTables
from rollout.weights import Box

ON_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_CARD else "cpu"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHOWN = ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16))
PAIRS = [
    pytest.param(a, b, marks=() if (a, b) in SHOWN else pytest.mark.more)
    for a in FLOATS
    for b in FLOATS
]
SHAPES = ((), (1,), (700,), (3, 5), (9, 600), (2, 3, 4), (70, 32), (70, 30), (0, 4))
WHOLE = ((5, 1024), (9216,), (2, 3, 512))  # of whole blocks


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return made.to(dtype).to(DEVICE)


def _views(x: Tensor) -> Iterator[Tensor]:
    """A region as it may lie: whole, a part of lines, every other line, cut in all dimensions."""
    yield x
    if x.dim() >= 2:
        yield x[:, 1:]
        yield x[::2]
        yield x.mT
    if x.dim() == 3:
        yield x[:, 1:, 1:3]


def _triton(op: Any) -> Callable[..., Any]:
    return _run(op, "triton")


def _run(op: Any, name: str) -> Callable[..., Any]:
    if name not in op.implementations() or (ON_CARD and name == "cpu"):
        pytest.skip(f"{name} does not run here")
    return op.implementation(name)  # type: ignore[no-any-return]


BACKENDS = pytest.mark.parametrize("backend", ["cpu", "triton"])


@BACKENDS
@pytest.mark.parametrize(("given", "wanted"), PAIRS)
def test_many_copies_at_once_give_what_single_ones_give(
    given: torch.dtype, wanted: torch.dtype, backend: str
) -> None:
    sources = [
        view
        for n, shape in enumerate((*SHAPES, *WHOLE))
        for view in _views(_values(shape, given, seed=n))
    ]
    expected = [source.to(wanted).contiguous() for source in sources]
    targets = [torch.full_like(source, 7, dtype=wanted) for source in sources]
    matrices = [source for source in sources if source.dim() > 1]
    targets += [torch.full_like(source.mT, 7, dtype=wanted).mT for source in matrices]
    expected += [source.to(wanted) for source in matrices]
    _run(copy_regions, backend)(targets, [*sources, *matrices])
    for target, right in zip(targets, expected, strict=True):
        assert torch.equal(target, right)


@BACKENDS
def test_copies_touch_nothing_beside_their_targets_and_keep_bits(backend: str) -> None:
    """Also of integers, and of what is NaN; lines go where they belong inside a larger tensor."""
    whole = torch.full((6, 50), 9, dtype=torch.int32, device=DEVICE)
    part = torch.arange(80, dtype=torch.int32, device=DEVICE).view(4, 20)
    odd = torch.tensor([0x7FC1, 0x7F81, -0x8000], dtype=torch.int16, device=DEVICE)
    bits = torch.zeros(3, dtype=torch.bfloat16, device=DEVICE)
    _run(copy_regions, backend)([whole[1:5, 3:23], bits], [part, odd.view(torch.bfloat16)])
    assert torch.equal(whole[1:5, 3:23], part)
    assert int((whole == 9).sum()) == whole.numel() - part.numel() + int((part == 9).sum())
    assert torch.equal(bits.view(torch.int16), odd)


@BACKENDS
@pytest.mark.parametrize(("given", "wanted"), PAIRS)
def test_many_digests_at_once_are_those_of_single_ones(
    given: torch.dtype, wanted: torch.dtype, backend: str
) -> None:
    values, places = [], []
    for n, shape in enumerate((*SHAPES[:6], SHAPES[-1], *WHOLE)):
        for view in _views(_values(shape, given, seed=n)):
            starts = tuple(range(1, view.dim() + 1))
            box = Box(starts, tuple(a + b for a, b in zip(starts, view.shape, strict=True)))
            places.append(DigestedAs(tuple(n + 3 for n in box.stops), box, wanted))
            values.append(view)
    values[2][5] = float("nan")
    values[2][6] = float("-inf")
    values[-10][2, 1000] = float("nan")  # so in its columns, every other line, and turned
    found = _run(digest_regions, backend)(values, places)
    for (total, bad), value, place in zip(found, values, places, strict=True):
        count = [0]
        cast = value.to(wanted).cpu()
        right = digest.reference(cast, place.shape, place.box, count)
        # The digits of a NaN that was cast are the device's own.
        assert bad == count[0]
        assert total == right or (bad and given != wanted)
    assert [bad for _, bad in found if bad] == [2, 1, 1, 1, 1]


def test_a_plan_is_made_once_for_regions_that_stay_where_they_are() -> None:
    tables, run = RegionTables(), _triton(copy_regions)
    source, target = _values((5, 40), torch.float32), torch.zeros((5, 40), device=DEVICE)
    run([target], [source], tables)
    [kept] = tables._plans.values()
    source += 1
    run([target], [source], tables)
    assert list(tables._plans.values()) == [kept]
    assert torch.equal(target, source)
    run([target], [source.clone()], tables)
    assert len(tables._plans) == 2


def test_what_is_cut_up_too_much_goes_by_itself() -> None:
    deep = _values((MOST_ROWS + 1, 3, 4), torch.float32)[:, :2, :3]
    target = torch.zeros(deep.shape, device=DEVICE)
    _triton(copy_regions)([target], [deep])
    assert torch.equal(target, deep)
    place = DigestedAs(tuple(deep.shape), Box.full(tuple(deep.shape)), torch.float32)
    [(total, _)] = _triton(digest_regions)([deep], [place])
    assert total == digest.reference(deep.cpu(), place.shape, place.box)


@BACKENDS
def test_a_region_outside_of_its_memory_is_refused_before_a_launch(backend: str) -> None:
    source, target = _values((40,), torch.float32), torch.zeros(40, device=DEVICE)
    source.untyped_storage().resize_(0)
    with pytest.raises(WeightMismatch, match="holds no memory"):
        _run(copy_regions, backend)([target], [source])
    place = DigestedAs((40,), Box.full((40,)), torch.float32)
    with pytest.raises(WeightMismatch, match="holds no memory"):
        _run(digest_regions, backend)([source], [place])
    assert not target.any()


@pytest.mark.skipif(ON_CARD, reason="accesses are seen in the interpreter alone")
def test_programs_of_a_table_stay_inside_its_regions_and_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sanitizer knows the launch's own tensors; the regions are named by address."""
    from kernels import sanitizer

    source = _values((9, 1100), torch.float32)
    target = torch.zeros((9, 2300), dtype=torch.bfloat16)[:, 5:1105]
    known = Launch.__init__
    monkeypatch.setattr(
        Launch, "__init__", lambda self, tensors: known(self, [*tensors, source, target])
    )
    with sanitizer.sanitized(monkeypatch) as launches:
        _triton(copy_regions)([target], [source])
        place = DigestedAs((9, 2000), Box((0, 7), (9, 1107)), torch.bfloat16)
        _triton(digest_regions)([source], [place])
    assert len(launches) == 2
    assert [(x.outside, x.races()) for x in launches] == [([], [])] * 2


def test_native_copies_round_every_float_as_torch_does() -> None:
    """Small numbers, which an instruction for it makes zero, among them."""
    run = _run(copy_regions, "cpu")
    bits = torch.arange(0, 1 << 32, 65521, dtype=torch.int64).to(torch.int32)
    bits = torch.cat((bits, torch.tensor([1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7F7FFFFF])))
    source = bits.to(torch.int32).view(torch.float32)
    target = torch.empty(len(source), dtype=torch.bfloat16)
    run([target], [source])
    right = source.to(torch.bfloat16)
    assert torch.equal(target.isnan(), source.isnan())
    numbers = ~source.isnan()
    assert torch.equal(target[numbers].view(torch.int16), right[numbers].view(torch.int16))
    [(total, _)] = _run(digest_regions, "cpu")(
        [source], [DigestedAs(tuple(source.shape), Box.full(tuple(source.shape)), torch.bfloat16)]
    )
    assert total == digest(target, tuple(target.shape), Box.full(tuple(target.shape)))
