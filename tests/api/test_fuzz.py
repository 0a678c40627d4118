"""Whatever bytes come: a named error, in time, and nothing grows."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.errors import ConfigError, TransferFailed
from rollout.rpc.chunks import UPDATE
from rollout.weight_sync.protocol.bucket import unpack
from rollout.weight_sync.protocol.messages import BucketHeader, Seal, UpdateRequest
from rollout.wire import frames
from rollout.wire.codec import from_plain

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from fuzz_messages import HEADER, REQUEST, SEAL, mangled, update_streams, values

QUICK = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

FORMS = {
    "header": (partial(from_plain, BucketHeader), HEADER),
    "request": (UpdateRequest.read, REQUEST),
    "seal": (partial(from_plain, Seal), SEAL),
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
            frames.decode(head, bytearray(payload))

    check()


def test_streams_of_an_update(engine, eventually) -> None:
    before, version = engine.weight_info(), engine.weight_version
    held = engine._async.backend.digests(10)
    with grpc.insecure_channel(engine.address) as channel:
        update = channel.stream_stream(UPDATE)
        warm: list[int] = []

        @settings(max_examples=150, **QUICK)
        @given(update_streams())
        def check(sent) -> None:
            started = time.monotonic()
            call = update(iter(sent), timeout=10)
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
