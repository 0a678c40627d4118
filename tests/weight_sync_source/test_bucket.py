"""Buckets: what goes in comes out, whatever its size, and nothing malformed is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.engine.worker.staged_load import _known
from rollout.errors import ConfigError, TransferFailed, WeightMismatch
from rollout.weight_sync.protocol.bucket import ALIGNMENT, check_size, read_in_place, unpack
from rollout.weight_sync.protocol.bucket_packer import BucketPacker
from rollout.weight_sync.protocol.in_place import Given, InPlaceHeaders
from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader
from rollout.weight_sync.trainer.transfer_stats import PlacesInPlace
from rollout.weight_sync.transports.inline import InlineReceiver
from rollout.weights import Box, TensorPiece
from rollout.wire.codec import from_plain, to_plain
from rollout.wire.frames import DTYPES

Named = list[tuple[str, Tensor]]


def random_tensor(shape: Iterable[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits (no bool or float has to survive arithmetic, only copying)."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, size, generator=generator).bool()
    raw = torch.randint(0, 256, (size.numel() * dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(size)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def round_trip(tensors: Named, bucket_bytes: int) -> tuple[dict[str, Tensor], list[BucketHeader]]:
    packer = BucketPacker(bucket_bytes)
    shadow = BucketPacker(bucket_bytes, "meta")
    found = {name: random_tensor(t.shape, t.dtype, 99) for name, t in tensors}
    covered = {name: torch.zeros(t.shape, dtype=torch.int32) for name, t in tensors}
    headers: list[BucketHeader] = []
    followed: list[BucketHeader] = []

    def take(made: Iterable[tuple[BucketHeader, Tensor]]) -> None:
        for header, payload in made:
            assert payload.numel() == header.nbytes <= bucket_bytes
            headers.append(header)
            again = from_plain(BucketHeader, to_plain(header))
            assert again == header
            for name, value in unpack(again, payload):
                piece = isinstance(value, TensorPiece)
                where = value.box.slices if piece else ...
                found[name][where] = value.values if piece else value
                covered[name][where] += 1

    for name, tensor in tensors:
        take(packer.add(name, tensor))
        followed += [h for h, _ in shadow.add(name, tensor.to("meta"))]
    take(packer.flush())
    followed += [h for h, _ in shadow.flush()]
    assert followed == headers
    assert [h.index for h in headers] == list(range(len(headers)))
    assert all((count == 1).all() for count in covered.values())
    assert packer.num_bytes == sum(t.numel() * t.dtype.itemsize for _, t in tensors)
    return found, headers


shapes = st.lists(st.integers(0, 9), max_size=4)
specs = st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPES))), max_size=8)


@settings(max_examples=150, deadline=None)
@given(specs=specs, bucket_bytes=st.integers(ALIGNMENT, 700), seed=st.integers(0, 9))
def test_any_tensors_come_out_of_any_bucket_size_bit_for_bit(
    specs: list[tuple[list[int], str]], bucket_bytes: int, seed: int
) -> None:
    tensors = [
        (f"t{i}", random_tensor(shape, DTYPES[dtype], seed + i))
        for i, (shape, dtype) in enumerate(specs)
    ]
    found, headers = round_trip(tensors, bucket_bytes)
    for name, tensor in tensors:
        assert bits(found[name]) == bits(tensor)
    assert {e.name for h in headers for e in h.entries} == {name for name, _ in tensors}


def test_a_tensor_that_fits_is_not_cut_and_a_larger_one_is_cut_by_rows() -> None:
    tensors = [("a", torch.randn(5)), ("b", torch.randn(30)), ("big", torch.randn(20, 10))]
    _, headers = round_trip(tensors, 128)
    entries = [entry for header in headers for entry in header.entries]
    assert [e.box for e in entries if e.name == "b"] == [Box.full((30,))]
    rows = [e.box for e in entries if e.name == "big"]
    assert all(box.shape[1] == 10 for box in rows)
    assert sum(box.shape[0] for box in rows) == 20


def test_a_row_larger_than_a_bucket_is_cut_too() -> None:
    tensors = [("wide", torch.randn(3, 100))]
    found, headers = round_trip(tensors, 64)
    assert torch.equal(found["wide"], tensors[0][1])
    assert len(headers) > 18


def test_strided_tensors_are_packed_in_row_major_order() -> None:
    tensor = torch.randn(6, 8).t()[::2]
    found, _ = round_trip([("t", tensor)], 96)
    assert torch.equal(found["t"], tensor)


def test_a_buffer_is_reused_only_after_it_was_reported_free() -> None:
    asked: list[int] = []
    packer = BucketPacker(64, num_buffers=2, wait_free=asked.append)
    payloads = []
    for i in range(5):
        for header, payload in packer.add(f"t{i}", torch.full((16,), float(i))):
            payloads.append((header.index, payload.data_ptr()))
            assert asked == list(range(max(0, header.index - 1)))
    payloads += [(header.index, payload.data_ptr()) for header, payload in packer.flush()]
    assert asked == [0, 1, 2]
    assert len({pointer for _, pointer in payloads}) == 2
    assert payloads[0][1] == payloads[2][1] == payloads[4][1]


def test_unpack_makes_views_and_no_copies() -> None:
    packer = BucketPacker(1024)
    list(packer.add("t", torch.randn(4, 4)))
    ((header, payload),) = packer.flush()
    ((_, value),) = unpack(header, payload)
    assert isinstance(value, Tensor)
    assert value.data_ptr() == payload.data_ptr()


ENTRY = BucketEntry("t", torch.float32, (4, 4), Box((1, 0), (3, 4)), 64, 32)


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 32},
        {"offset": 0, "nbytes": 33},
        {"offset": -64},
        {"offset": 128},
        {"nbytes": -32},
        {"box": Box((3, 0), (5, 4))},
        {"box": Box((1,), (3,))},
        {"box": Box((0, 0), (4, 4))},
        {"dtype": torch.complex64},
        {"dtype": torch.float16},
        {"shape": (4, -4)},
        {"shape": (1 << 50, 4)},
        {"name": ""},
        {"name": "n" * 2000},
    ],
)
def test_a_malformed_entry_is_refused_before_memory_is_touched(
    change: dict[str, object],
) -> None:
    payload = torch.zeros(128, dtype=torch.uint8)
    list(unpack(BucketHeader(0, (ENTRY,), 128), payload))
    with pytest.raises(TransferFailed, match="bucket 0"):
        unpack(BucketHeader(0, (dataclasses.replace(ENTRY, **change),), 128), payload)


LYING = BucketEntry("t", torch.float32, (4, 4), Box((1, 0), (3, 4)), 64, 32, region=1)


def test_an_entry_is_read_where_it_lies_in_its_region() -> None:
    regions = [torch.zeros(8, dtype=torch.uint8), torch.arange(32.0).view(torch.uint8)]
    [(name, piece)] = read_in_place(BucketHeader(0, (LYING,), 0), regions)
    assert (name, piece.box) == ("t", LYING.box)
    assert torch.equal(piece.values, torch.arange(16.0, 24.0).view(2, 4))
    assert piece.values.data_ptr() == regions[1].data_ptr() + 64


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 97},
        {"offset": 100},
        {"offset": 65},
        {"offset": 1 << 62},
        {"region": 0},
        {"region": 2},
        {"region": None},
        {"sparse": 1},
        {"nbytes": 28},
        {"box": Box((0, 0), (4, 4))},
        {"dtype": torch.float16},
        {"name": ""},
    ],
)
def test_an_entry_that_reaches_beyond_its_region_is_refused(change: dict[str, object]) -> None:
    regions = [torch.zeros(16, dtype=torch.uint8), torch.arange(32.0).view(torch.uint8)]
    header = BucketHeader(3, (dataclasses.replace(LYING, **change),), 0)
    with pytest.raises(TransferFailed, match="bucket 3"):
        read_in_place(header, regions)


def test_a_bucket_that_carries_bytes_has_no_entry_elsewhere() -> None:
    with pytest.raises(TransferFailed, match="lies elsewhere"):
        unpack(BucketHeader(0, (LYING,), 128), torch.zeros(128, dtype=torch.uint8))


def test_tensors_of_another_process_are_not_read_in_place() -> None:
    receiver = InlineReceiver()
    header = BucketHeader(0, (LYING,), 0)
    for carried in ({}, {"payload": torch.zeros(96, dtype=torch.uint8)}):
        with pytest.raises(TransferFailed, match="without the tensors"):
            receiver.regions(header, carried)


def test_overlapping_entries_and_payloads_of_another_length_are_refused() -> None:
    payload = torch.zeros(128, dtype=torch.uint8)
    with pytest.raises(TransferFailed, match="overlap"):
        unpack(BucketHeader(0, (ENTRY, ENTRY), 128), payload)
    with pytest.raises(TransferFailed, match="payload"):
        unpack(BucketHeader(0, (ENTRY,), 128), payload[:96])
    with pytest.raises(TransferFailed, match="agreed"):
        check_size(BucketHeader(0, (ENTRY,), 128), 100)


def test_what_cannot_travel_is_refused_by_name() -> None:
    with pytest.raises(WeightMismatch, match=r"phases.*complex64"):
        list(BucketPacker(1024).add("phases", torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(ConfigError, match="bucket_bytes"):
        BucketPacker(8)


def test_what_is_written_to_its_room_is_not_copied_and_arrives() -> None:
    packer = BucketPacker(256)
    first, second = torch.arange(20, dtype=torch.float32), torch.arange(48, dtype=torch.float32)
    assert list(packer.begin(first.nbytes)) == []
    assert list(packer.add("first", first)) == []
    (full,) = packer.begin(second.nbytes)  # it does not fit beside the first
    assert [entry.name for entry in full[0].entries] == ["first"]
    room = packer.buffer_for(torch.float32, (6, 8))
    assert room is not None
    room.copy_(second.view(6, 8))
    assert list(packer.add("second", room)) == []
    ((header, payload),) = packer.flush()
    ((name, found),) = unpack(header, payload)
    assert (name, found.data_ptr()) == ("second", room.data_ptr())
    assert torch.equal(found, second.view(6, 8))


def test_a_tensor_that_will_be_cut_has_no_room() -> None:
    packer = BucketPacker(256)
    list(packer.add("first", torch.zeros(4)))
    assert list(packer.begin(400)) == []
    assert packer.buffer_for(torch.float32, (100,)) is None
    assert packer.buffer_for(torch.float32, (0, 7)) is None


def test_headers_and_places_are_made_again_only_for_other_tensors() -> None:
    headers, digested = InPlaceHeaders(), PlacesInPlace()
    tensors = [("a", torch.zeros(2, 3)), ("b", torch.zeros(4))]
    header = headers.header(0, tensors)
    dtypes = (torch.float32, torch.float32)
    given = [Given(("x", "y"), ((0, 64), (1, 0)), dtypes)]
    entries = headers.placed(header, given)
    assert [(entry.region, entry.offset) for entry in entries] == [(0, 64), (1, 0)]
    as_they_are = digested.of(header, lambda name, dtype: dtype)
    assert headers.header(0, list(tensors)) is header
    assert headers.placed(header, list(given)) is entries
    assert digested.of(header, lambda name, dtype: dtype) is as_they_are
    behind = [Given(("x",), ((0, 64),), dtypes[:1]), Given(("y",), ((0, 256),), dtypes[1:])]
    moved = headers.placed(header, behind)  # of two processes, one's regions after the other's
    assert [(entry.region, entry.offset) for entry in moved] == [(0, 64), (1, 256)]
    narrow = [Given(("x",), ((0, 64), (0, 256)), (torch.bfloat16, torch.bfloat16))]
    assert [(x.dtype, x.nbytes) for x in headers.placed(header, narrow)] == [
        (torch.bfloat16, 2 * x.box.numel) for x in header.entries
    ]
    cast = digested.of(header, lambda name, dtype: torch.bfloat16)
    assert [place.dtype for place in cast] == [torch.bfloat16] * 2
    other = headers.header(0, [("a", torch.zeros(3, 2)), ("b", torch.zeros(4))])
    assert headers.placed(other, behind)[0].shape == (3, 2)
    assert digested.of(other, lambda name, dtype: dtype)[0].shape == (3, 2)


def test_a_bucket_is_known_only_where_its_entries_begin_at_whole_elements() -> None:
    region = torch.zeros(64, dtype=torch.uint8)
    lies = BucketEntry("a", torch.float32, (4,), Box.full((4,)), 2, 16, region=0)
    load = SimpleNamespace(plan=lambda parts: SimpleNamespace(shapes=((4,),)))
    for offset, known in ((2, False), (4, True)):
        header = BucketHeader(0, (dataclasses.replace(lies, offset=offset),), 0)
        found = _known(header, [region], None, load)  # type: ignore[arg-type]
        assert (found is not None) == known
