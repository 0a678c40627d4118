"""What was read in place before is read again only where it lies as it did."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.models.weight_io.known_bucket import KnownBucket
from rollout.models.weight_io.load import LoadPlan

SHAPES = ((3, 4), (5,))
STRIDES = ([4, 1], [1])
PLAN = LoadPlan((("a", None), ("b", None)), SHAPES, (), (), (), 0)


def _known(starts: tuple[tuple[int, int], ...], sizes: list[int]) -> KnownBucket:
    lies = [(*start, strides) for start, strides in zip(starts, STRIDES, strict=True)]
    dtypes = (torch.float32, torch.bfloat16)
    return KnownBucket(entries=(), sizes=sizes, lies=lies, dtypes=dtypes, plan=PLAN)


def _tensors() -> list[Tensor]:
    return [torch.arange(12.0).view(3, 4), torch.arange(5).bfloat16()]


def test_a_region_is_the_tensor_itself_or_bytes_that_hold_it() -> None:
    a, b = _tensors()
    known = _known(((0, 0), (1, 0)), [48, 10])
    assert known.values([a, b]) == [a, b]
    room = torch.zeros(80, dtype=torch.uint8)[16:]
    room[:48], room[48:58] = a.view(-1).view(torch.uint8), b.view(torch.uint8)
    together = _known(((0, 0), (0, 24)), [64])
    found = together.values([room])
    assert found is not None
    assert torch.equal(found[0], a)
    assert torch.equal(found[1], b)
    assert found[0].data_ptr() == room.data_ptr()  # no copy


def test_other_regions_than_before_are_looked_at_anew() -> None:
    a, b = _tensors()
    known = _known(((0, 0), (1, 0)), [48, 10])
    raw = [x.view(-1).view(torch.uint8) for x in (a, b)]
    assert known.values([a]) is None
    assert known.values([a, torch.zeros(12, dtype=torch.uint8)]) is None
    assert known.values([a.double(), b]) is None
    assert known.values([torch.zeros(96, dtype=torch.uint8)[::2], raw[1]]) is None
    assert known.values([torch.zeros(50, dtype=torch.uint8)[2:], raw[1]]) is None  # not aligned
    assert known.values(raw) is not None
