"""A header that comes again is the one before, so that what was found out of it still holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout.engine.worker.rank_updates import RankUpdates
from rollout.errors import TransferFailed
from rollout.weight_sync.protocol import header_reader
from rollout.weight_sync.protocol.header_reader import HeaderReader
from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader
from rollout.weights import Box
from rollout.wire.codec import from_json, to_json


def _header(index: int, rows: int, region: int | None = 0) -> BucketHeader:
    shape = (rows, 4)
    entry = BucketEntry("w", torch.float32, shape, Box.full(shape), 0, 16 * rows, region=region)
    return BucketHeader(index, (entry,), 0 if region is not None else 16 * rows, regions=("ab",))


def test_a_header_that_comes_again_has_the_entries_of_before() -> None:
    nobody: Any = None
    rank = RankUpdates(nobody, 0, "cpu")
    first = rank._known(_header(0, 3))
    again = from_json(BucketHeader, to_json(replace(_header(0, 3), regions=("cd",))))
    known = rank._known(again)
    assert known.entries is first.entries
    assert known.regions == ("cd",)  # handles are of each update
    assert rank._known(_header(1, 3)).entries is not first.entries
    other = rank._known(_header(0, 5))
    assert other.entries[0].shape == (5, 4)
    assert rank._known(_header(0, 3)).entries is not first.entries  # the last one alone is known
    carried = _header(0, 3, region=None)
    assert rank._known(carried) is carried


def test_a_header_with_regions_is_written_as_it_is_without() -> None:
    header = _header(0, 3)
    assert from_json(BucketHeader, to_json(header)) == header
    assert b"regions" in to_json(header)
    assert b"regions" not in to_json(replace(header, regions=()))


def test_entries_whose_text_comes_again_are_read_once() -> None:
    reader = HeaderReader()
    first = reader.read(to_json(_header(0, 3)))
    assert first == _header(0, 3)
    again = reader.read(to_json(replace(_header(0, 3), regions=("cd",))))
    assert again == replace(_header(0, 3), regions=("cd",))
    assert again.entries is first.entries
    assert reader.read(to_json(_header(1, 3))).entries is not first.entries
    assert reader.read(to_json(_header(0, 5))) == _header(0, 5)
    assert reader.read(to_json(_header(0, 3))).entries is not first.entries  # the last one's alone
    carried = to_json(_header(2, 3, region=None))
    assert reader.read(carried).entries is not reader.read(carried).entries


def test_beside_entries_of_before_the_rest_is_checked() -> None:
    reader = HeaderReader()
    text = to_json(_header(0, 3))
    reader.read(text)
    for old, new in (
        (b'"nbytes":0,"m', b'"nbytes":-1,"m'),
        (b'"regions":["ab"]', b'"regions":[1]'),
        (b'"regions":["ab"]', b'"more":1'),
        (b'"regions":["ab"]}', b'"regions":["ab"]'),
        (b'"nbytes":0,"m', b'"m'),
    ):
        assert text.count(old) == 1
        with pytest.raises(TransferFailed):
            reader.read(text.replace(old, new))
    assert reader.read(text) == _header(0, 3)


def test_texts_that_are_kept_are_bounded(monkeypatch) -> None:
    reader = HeaderReader()
    size = len(to_json(_header(0, 3).entries))
    monkeypatch.setattr(header_reader, "MAX_KEPT", 4 * size)
    for index in range(100):
        reader.read(to_json(_header(index, 3)))
        assert sum(len(text) for text, _ in reader._last.values()) <= 4 * size
    assert reader._last
