"""The plain forms of an update's nouns: they survive JSON, and malformed ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rollout.distributed import Rendezvous
from rollout.errors import TransferFailed
from rollout.weight_sync.protocol import codec as uw
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketEntry,
    BucketHeader,
    RankReceipt,
    Seal,
    UpdateReceipt,
    UpdateRequest,
    WeightInfo,
)
from rollout.weights import Box, TensorMeta

META = TensorMeta("a.weight", torch.bfloat16, (3, 4))
WHERE = Rendezvous("127.0.0.1", 4711, "s", 3, "tcp")
BIG = (1 << 64) - 1
NOUNS: list[tuple[str, Any]] = [
    ("meta", META),
    ("rendezvous", WHERE),
    (
        "header",
        BucketHeader(2, (BucketEntry("a", torch.int8, (4,), Box((1,), (3,)), 64, 2),), 66),
    ),
    ("request", UpdateRequest(update_id="u", bucket_bytes=64, timeout=3)),
    (
        "request",
        UpdateRequest(
            update_id="u",
            version=3,
            base=(BIG, 2),
            encoding="delta",
            metadata=(META,),
            partial=True,
            transport="broadcast",
            offer={"rendezvous": uw.rendezvous_to_wire(WHERE)},
            bucket_bytes=64,
            staging="host",
            in_flight="abort",
            label="step-1",
            timeout=3.5,
        ),
    ),
    ("begun", Begun(update_id="u", epoch=BIG, base_version=1, version=2)),
    (
        "info",
        WeightInfo(
            epoch=5,
            version=2,
            label=None,
            state="idle",
            dtype=torch.float32,
            tensors=(META,),
            aliases={"lm_head.weight": "a.weight"},
            tensor_parallel_size=2,
            device="cpu",
            transports=("inline", "broadcast"),
            last_update_id="u",
        ),
    ),
    ("seal", Seal(num_buckets=2, digests={"a": BIG}, wire_bytes=7, details={"encoding": "x"})),
    (
        "receipt",
        UpdateReceipt(
            version=2,
            epoch=BIG,
            digest=BIG,
            num_tensors=1,
            num_bytes=24,
            wire_bytes=64,
            timings={"stall": 0.25},
            ranks=(RankReceipt(0, 2, BIG, 24),),
            update_id="u",
            transport="inline",
            label="l",
            details={"fallback": True},
        ),
    ),
]


def through_json(kind: str, noun: Any) -> Any:
    return json.loads(json.dumps(getattr(uw, f"{kind}_to_wire")(noun)))


@pytest.mark.parametrize(("kind", "noun"), NOUNS)
def test_every_noun_survives_json(kind: str, noun: Any) -> None:
    assert getattr(uw, f"{kind}_from_wire")(through_json(kind, noun)) == noun


@pytest.mark.parametrize(("kind", "noun"), NOUNS)
def test_a_field_that_is_missing_or_of_another_type_is_refused(kind: str, noun: Any) -> None:
    parse = getattr(uw, f"{kind}_from_wire")
    for wrong in (None, 7, "text", [], {}):
        with pytest.raises(TransferFailed):
            parse(wrong)
    good = through_json(kind, noun)
    keys = range(len(good)) if isinstance(good, list) else list(good)
    for key in keys:
        for wrong in (object(), -1.5):  # neither has a place in any field
            bad = list(good) if isinstance(good, list) else dict(good)
            bad[key] = wrong
            if key == "details" and kind == "receipt":
                continue
            with pytest.raises(TransferFailed):
                parse(bad)
        if isinstance(good, dict):
            with pytest.raises(TransferFailed, match=str(key)):
                parse({k: v for k, v in good.items() if k != key})


def test_negative_sizes_unknown_dtypes_and_inverted_boxes_are_refused() -> None:
    header = through_json("header", NOUNS[2][1])
    for position, wrong in (
        (1, "complex64"),
        (2, [-4]),
        (3, [5]),
        (5, -64),
        (6, True),
        (4, [1] * 99),
    ):
        entry = list(header["entries"][0])
        entry[position] = wrong
        with pytest.raises(TransferFailed):
            uw.header_from_wire({**header, "entries": [entry]})
    with pytest.raises(TransferFailed):
        uw.begun_from_wire({**through_json("begun", NOUNS[5][1]), "epoch": BIG + 1})
