"""Whatever bytes come: a named error, in time, and nothing grows."""

from __future__ import annotations

import contextlib
import json
import time

import grpc
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout import rollout_pb2 as pb
from rollout import update_wire, wire
from rollout.errors import ConfigError, TransferFailed
from rollout.rollout_pb2_grpc import WeightSyncStub
from rollout.updates import BucketEntry, BucketHeader, Seal, UpdateRequest
from rollout.weight_sync.bucket import unpack
from rollout.weights import Box

QUICK = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 70), st.floats(), st.text(max_size=8),
    st.sampled_from(["float32", "bfloat16", "x", "inline", "broadcast", "ipc", "full", "delta"]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)

ENTRY = BucketEntry("x", torch.float32, (2, 2), Box.full((2, 2)), 0, 16)
HEADER = update_wire.header_to_wire(BucketHeader(0, (ENTRY,), 16))
REQUEST = update_wire.request_to_wire(
    UpdateRequest(update_id="u", bucket_bytes=1 << 10, timeout=0.2)
)
SEAL = update_wire.seal_to_wire(Seal(num_buckets=1, digests={"x": 1}))


@st.composite
def mangled(draw, good):
    """A good document with some of its parts, however deep, replaced."""
    document = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 3))):
        at = document
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(at[key], dict | list) and at[key] and draw(st.booleans()):
                at = at[key]
                continue
            at[key] = draw(values)
            break
    return document


FORMS = {
    "header": (update_wire.header_from_wire, HEADER),
    "request": (update_wire.request_from_wire, REQUEST),
    "seal": (update_wire.seal_from_wire, SEAL),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_an_update(form) -> None:
    parse, good = FORMS[form]
    parse(good)

    @settings(max_examples=400, **QUICK)
    @given(st.one_of(mangled(good), values))
    def check(document) -> None:
        with contextlib.suppress(TransferFailed, ConfigError):  # the latter: another protocol
            parsed = parse(document)
            if form == "header":
                list(unpack(parsed, torch.zeros(16, dtype=torch.uint8), sparse=True))

    check()


def test_frames() -> None:
    described = {"a": ["float32", [2], 0, 8], "b": ["int8", [3], 8, 3]}

    @settings(max_examples=600, **QUICK)
    @given(
        st.one_of(
            st.binary(max_size=64),
            mangled({"id": 1, "tensors": described}).map(lambda d: json.dumps(d).encode()),
            st.integers(100, 200_000).map(lambda deep: b"[" * deep),
        ),
        st.binary(max_size=16),
    )
    def check(head, payload) -> None:
        with contextlib.suppress(TransferFailed):
            wire.decode(head, bytearray(payload))

    check()


commands = st.one_of(
    mangled(REQUEST).map(lambda d: {"begin": document(d)}),
    st.just({"begin": pb.WeightDocument(json=json.dumps(REQUEST).encode())}),
    st.builds(
        lambda d, n: {"bucket": pb.Bucket(header_json=json.dumps(d).encode(), payload_bytes=n)},
        st.one_of(mangled(HEADER), st.just(HEADER)), st.sampled_from([0, 16, 17, 1 << 62]),
    ),
    st.binary(max_size=40).map(lambda data: {"chunk": data}),
    st.builds(
        lambda i, t: {"wait": pb.Wait(index=i, timeout=t)}, st.integers(0, 2**32 - 1), st.floats()
    ),
    mangled(SEAL).map(lambda d: {"seal": document(d)}),
    st.binary(max_size=40).map(lambda data: {"seal": pb.WeightDocument(json=data)}),
    st.just({"commit": pb.Commit()}),
    st.just({"abort": pb.AbortUpdate(reason="x")}),
    st.just({}),
)  # fmt: skip


def document(value):
    return pb.WeightDocument(json=json.dumps(value).encode())


def test_streams_of_an_update(engine, eventually) -> None:
    before, version = engine.weight_info(), engine.weight_version
    held = engine._async.backend.digests(10)
    with grpc.insecure_channel(engine.address) as channel:
        update = WeightSyncStub(channel).Update
        warm: list[int] = []

        @settings(max_examples=150, **QUICK)
        @given(st.lists(commands, max_size=6), st.booleans())
        def check(sent, orderly) -> None:
            if orderly:
                sent = [{"begin": document(REQUEST)}, *sent]
            started = time.monotonic()
            call = update(iter([pb.UpdateCommand(**kind) for kind in sent]), timeout=10)
            with contextlib.suppress(grpc.RpcError):
                list(call)
            assert call.code() is not grpc.StatusCode.UNKNOWN, call.details()
            assert time.monotonic() - started < 25
            warm.append(psutil.Process().memory_info().rss)

        check()
    eventually(lambda: engine.weight_info().state == "idle")
    assert engine.weight_version == version
    assert engine._async.backend.digests(10) == held
    assert engine.weight_info().tensors == before.tensors
    assert max(warm[-10:]) < warm[len(warm) // 3] + (32 << 20)
