"""Nouns that travel: they survive JSON, and malformed ones are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from rollout.distributed import Rendezvous
from rollout.errors import ConfigError, TransferFailed
from rollout.weight_sync.protocol.membership import Grant, PrepareRollback
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketEntry,
    BucketHeader,
    Decision,
    Seal,
    UpdateRequest,
    WeightInfo,
)
from rollout.weight_sync.protocol.receipts import RankReceipt, UpdateReceipt
from rollout.weights import Box, TensorMeta
from rollout.wire.codec import from_json, from_plain, to_json, to_plain

META = TensorMeta("a.weight", torch.bfloat16, (3, 4))
WHERE = Rendezvous("127.0.0.1", 4711, "s", 3, "tcp")
BIG = (1 << 64) - 1
NOUNS: list[Any] = [
    META,
    WHERE,
    BucketHeader(2, (BucketEntry("a", torch.int8, (4,), Box((1,), (3,)), 64, 2),), 66),
    UpdateRequest(update_id="u", bucket_bytes=64, timeout=3),
    UpdateRequest(
        update_id="u",
        version=3,
        base=(BIG, 2),
        encoding="delta",
        metadata=(META,),
        partial=True,
        transport="broadcast",
        offer={"rendezvous": to_plain(WHERE)},
        bucket_bytes=64,
        staging="host",
        in_flight="abort",
        label="step-1",
        timeout=3.5,
    ),
    Begun(update_id="u", epoch=BIG, base_version=1, version=2),
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
    Seal(num_buckets=2, digests={"a": BIG}, wire_bytes=7, details={"encoding": "x"}),
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
]


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: type(noun).__name__)
def test_every_noun_survives_json(noun: Any) -> None:
    assert from_json(type(noun), to_json(noun)) == noun
    assert from_plain(type(noun), json.loads(json.dumps(to_plain(noun)))) == noun


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: type(noun).__name__)
def test_a_field_too_few_or_many_or_of_another_type_is_refused(noun: Any) -> None:
    kind, good = type(noun), to_plain(noun)
    for wrong in (None, 7, "text", [], {}, {**good, "pigeons": 1}):
        with pytest.raises(TransferFailed, match=f"malformed {kind.__name__}"):
            from_plain(kind, wrong)
    for key in good:
        for wrong in (object(), -1.5):  # neither has a place in any field
            with pytest.raises(TransferFailed):
                from_plain(kind, {**good, key: wrong})
        with pytest.raises(TransferFailed, match=f"missing fields: {key}"):
            from_plain(kind, {k: v for k, v in good.items() if k != key})


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "complex64"}, {"dtype": 7}, {"shape": [-4]}, {"shape": [1] * 99},
        {"box": {"starts": [5], "stops": [3]}}, {"box": {"starts": [1], "stops": [3], "by": 1}},
        {"offset": -64}, {"offset": 1 << 63}, {"nbytes": True}, {"nbytes": 2.0}, {"sparse": 9},
        {"name": "a" * (1 << 17)}, {"name": None},
    ],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_what_is_out_of_bounds_deep_inside_is_refused_by_name(wrong: dict[str, Any]) -> None:
    good = to_plain(NOUNS[2])
    bad = {**good, "entries": [{**good["entries"][0], **wrong}]}
    with pytest.raises(TransferFailed, match=r"entries|dtype"):
        from_plain(BucketHeader, bad)


def test_integers_have_64_bits_and_seconds_are_numbers() -> None:
    begun, seal = to_plain(NOUNS[5]), to_plain(NOUNS[7])
    for kind, bad in (
        (Begun, {**begun, "epoch": BIG + 1}),
        (Begun, {**begun, "version": 1 << 63}),
        (Seal, {**seal, "digests": {"a": BIG + 1}}),
        (Seal, {**seal, "gather_seconds": float("nan")}),
        (Seal, {**seal, "gather_seconds": float("inf")}),
        (UpdateRequest, {**to_plain(NOUNS[4]), "base": [BIG + 1, 1]}),
    ):
        with pytest.raises(TransferFailed):
            from_plain(kind, bad)


@pytest.mark.parametrize(
    "noun",
    [
        Seal(num_buckets=1, digests={}, fence=3),
        Decision(update_id="u", commit=False, fence=3),
        Grant(fence=3, epoch=None),
        PrepareRollback(update_id="u", version=1, digest=2, fence=3, timeout=1.0),
    ],
    ids=lambda noun: type(noun).__name__,
)
def test_a_fence_that_leaves_none_above_it_is_refused(noun: Any) -> None:
    plain = to_plain(noun)
    most = (1 << 53) - 1
    assert from_plain(type(noun), {**plain, "fence": most}).fence == most
    for fence in (most + 1, (1 << 63) - 1):
        with pytest.raises(TransferFailed, match=r"<= 9007199254740991 - at `\$.fence`"):
            from_plain(type(noun), {**plain, "fence": fence})


@pytest.mark.parametrize(
    "details",
    [{str(n): "" for n in range(65)}, {"a": "b" * 40_000, "c": "d" * 40_000}],
    ids=["many", "long"],
)
def test_a_seals_details_are_what_64_receipts_may_keep(details: dict[str, str]) -> None:
    plain = to_plain(Seal(num_buckets=1, digests={}))
    with pytest.raises(TransferFailed, match="at most 64 of 65536 together"):
        from_plain(Seal, {**plain, "details": details})
    with pytest.raises(ConfigError, match="at most 64 of 65536 together"):
        Seal(num_buckets=1, digests={}, details=details)


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(TransferFailed, match="UTF-8"):
        UpdateRequest.read({**to_plain(NOUNS[3]), "offer": {"x": "\ud800"}})
    for data in (b"", b"{", b"\xff", b'{"a":NaN}', b"[" * 100_000):
        with pytest.raises(TransferFailed):
            from_json(Begun, data)


FIRST_READS = """
import sys, threading
from dataclasses import make_dataclass
from rollout.wire.codec import from_plain

sys.setswitchinterval(1e-6)
names = [f"x{i}" for i in range(20)]
for _ in range(100):
    inner = make_dataclass("Inner", [(name, int) for name in names])
    outer = make_dataclass("Outer", [(name, inner) for name in names])
    plain = dict.fromkeys(names, dict.fromkeys(names, 1))
    gate, read = threading.Barrier(4), []
    def go():
        gate.wait(60)
        read.append(from_plain(outer, plain))
    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(read) == 4 and read[0] == read[3]
"""


def test_threads_may_read_a_noun_for_the_first_time_at_once() -> None:
    """In a process of its own: msgspec by itself would end it by SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", FIRST_READS], timeout=120, check=False)
    assert done.returncode == 0
