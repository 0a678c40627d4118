"""What comes in every update as it did before is written once, and read once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rollout.errors import TransferFailed
from rollout.weight_sync.protocol.messages import UpdateRequest
from rollout.weights import TensorMeta
from rollout.wire.codec import from_json, to_json
from rollout.wire.repeated import RepeatedReader, RepeatedWriter


def _request(update_id: str, rows: int) -> UpdateRequest:
    metadata = tuple(TensorMeta(name, torch.bfloat16, (rows, 4)) for name in ("a", "b"))
    return UpdateRequest(update_id=update_id, metadata=metadata, bucket_bytes=512, timeout=1.0)


def test_a_written_document_says_what_the_noun_does() -> None:
    writer = RepeatedWriter("metadata")
    limited = replace(_request("3", 5), max_stall=0.5, label="é")
    without = replace(_request("4", 5), metadata=None)
    for request in (_request("1", 3), _request("2", 3), _request("3", 5), limited, without):
        assert from_json(UpdateRequest, writer.to_json(request)) == request
        assert writer.to_json(request) == writer.to_json(request)
    assert b"max_stall" not in writer.to_json(_request("1", 3))  # as ``to_json`` leaves it out
    with pytest.raises(TransferFailed, match="UTF-8"):
        writer.to_json(replace(without, label="\udcff"))


def test_a_field_is_written_once_while_it_is_the_same() -> None:
    writer = RepeatedWriter("metadata")
    writer.to_json(_request("1", 3))
    text = writer._last["metadata"][1]
    writer.to_json(_request("2", 3))
    assert writer._last["metadata"][1] is text
    writer.to_json(_request("2", 5))
    assert writer._last["metadata"][1] is not text


def test_a_field_whose_text_comes_again_is_the_same_object() -> None:
    reader = RepeatedReader(UpdateRequest, "metadata")
    first = reader.from_json(to_json(_request("1", 3)))
    again = reader.from_json(to_json(_request("2", 3)))
    assert again == _request("2", 3)
    assert again.metadata is first.metadata
    other = reader.from_json(to_json(_request("3", 5)))
    assert other == _request("3", 5)
    without = reader.from_json(to_json(replace(_request("4", 5), metadata=None)))
    assert without.metadata is None
    assert reader.from_json(to_json(replace(_request("5", 5), metadata=None))) == replace(
        _request("5", 5), metadata=None
    )


def test_what_is_wrong_is_refused_also_beside_what_is_known() -> None:
    reader = RepeatedReader(UpdateRequest, "metadata")
    good = to_json(_request("1", 3))
    reader.from_json(good)
    for bad in (
        good.replace(b'"timeout":1.0', b'"timeout":-1.0'),
        good.replace(b'"timeout":1.0', b'"timeout":1.0,"more":1'),
        good.replace(b"[3,4]", b"[-3,4]", 1),
        b"[]",
        good[:-1],
    ):
        assert bad != good
        with pytest.raises(TransferFailed, match="malformed UpdateRequest"):
            reader.from_json(bad)
    assert reader.from_json(good) == _request("1", 3)
