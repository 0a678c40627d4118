"""Large tensors of calls lie in memory that the ranks share, once, and for as long as needed."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from concurrent.futures import Future

import pytest
import torch
from safetensors.torch import load_file

from rollout import Rollout
from rollout.engine.steps import shared_payloads
from rollout.engine.steps.shared_payloads import PayloadMemory, PayloadViews
from rollout.errors import TransferFailed
from rollout.rpc import rollout_pb2 as pb
from rollout.server.grpc.updates import HeldUpdates, UpdateStream, document
from rollout.weight_sync.protocol.messages import Begun, BucketHeader, UpdateRequest
from rollout.wire.codec import to_json, to_plain

LARGE = 3 << 20


@pytest.fixture
def memory():
    made = PayloadMemory()
    yield made
    made.close()


def test_what_is_placed_is_seen_and_places_are_used_again(memory) -> None:
    views = PayloadViews(os.dup(memory.fd))
    a = torch.randint(0, 255, (LARGE,), dtype=torch.uint8)
    b = torch.randn(3, LARGE // 8)[:, ::2]  # not contiguous
    first, at = memory.place({"a": a, "b": b})
    second, later = memory.place({"a": a + 1})
    seen = views.views(first) | {"next": views.views(second)["a"]}
    assert torch.equal(seen["a"], a)
    assert torch.equal(seen["b"], b)
    assert torch.equal(seen["next"], a + 1)
    futures = [Future(), Future()]
    memory.free_after(futures, at, {})
    futures[0].set_result(None)
    assert memory.place({"c": a})[1] > later  # one rank still reads
    futures[1].set_exception(OSError("died"))
    assert memory.place({"c": a})[1] == at
    assert torch.equal(views.views(second)["a"], a + 1)


def test_memory_goes_back_when_nothing_has_lain_in_it_for_a_while(memory, monkeypatch) -> None:
    monkeypatch.setattr(shared_payloads, "_IDLE", 0.2)
    a = torch.ones(LARGE, dtype=torch.uint8)
    _, at = memory.place({"a": a})
    _, later = memory.place({"a": a})
    memory.free(at)
    time.sleep(0.5)
    assert os.fstat(memory.fd).st_size >= 2 * LARGE
    memory.free(later)
    assert os.fstat(memory.fd).st_size >= 2 * LARGE
    deadline = time.monotonic() + 5
    while os.fstat(memory.fd).st_size and time.monotonic() < deadline:
        time.sleep(0.05)
    assert os.fstat(memory.fd).st_size == 0
    views = PayloadViews(os.dup(memory.fd))
    rows, _ = memory.place({"a": a})
    assert torch.equal(views.views(rows)["a"], a)


def test_what_cannot_be_placed_leaves_no_place_behind(memory, monkeypatch) -> None:
    with pytest.raises(TransferFailed, match="complex64"):
        memory.place({"a": torch.ones(LARGE, dtype=torch.complex64)})
    assert memory.place({"a": torch.ones(LARGE)})[1] == 0

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert memory.place({"a": torch.ones(LARGE)}) is None
    memory.close()
    assert memory.place({"a": torch.ones(LARGE)}) is None


def test_short_tensors_stay_in_the_frame_and_a_rank_without_the_memory_says_so(memory) -> None:
    assert memory.place({"a": torch.ones(9)}) is None
    rows, _ = memory.place({"a": torch.ones(LARGE)})
    with pytest.raises(TransferFailed, match="has not got"):
        PayloadViews(None).views(rows)


def test_what_lies_in_a_room_is_not_copied_and_stays_until_it_has_been_read(memory) -> None:
    views = PayloadViews(os.dup(memory.fd))
    buffer = memory.buffer(LARGE)
    buffer.copy_(torch.arange(LARGE) % 251)
    rows, at = memory.place({"payload": buffer})
    assert at is None
    seen = views.views(rows)["payload"]
    buffer[7] = 99
    assert seen[7] == 99  # the same memory
    futures = [Future(), Future()]
    memory.free_after(futures, at, {"payload": buffer})
    del buffer
    other = memory.buffer(LARGE)
    other.zero_()
    assert seen[7] == 99  # one rank still reads
    for future in futures:
        future.set_result(None)
    del futures, future
    _, at = memory.place({"a": other.clone()})
    assert at == rows["payload"][2]  # free again


def test_a_tensor_from_elsewhere_or_from_the_midst_of_a_room_is_copied(memory) -> None:
    views = PayloadViews(os.dup(memory.fd))
    buffer = memory.buffer(LARGE)
    buffer.fill_(3)
    for tensors in ({"a": buffer[4096:]}, {"a": buffer, "b": torch.ones(9)}):
        rows, at = memory.place(tensors)
        assert at is not None
        assert torch.equal(views.views(rows)["a"], tensors["a"])
    assert memory.buffer(9) is None
    memory.close()
    assert memory.buffer(LARGE) is None


def test_buffers_that_nobody_has_any_more_are_given_back(memory, monkeypatch) -> None:
    monkeypatch.setattr(shared_payloads, "_IDLE", 0.1)
    buffers = [memory.buffer(LARGE) for _ in range(3)]
    with memory._lock:  # as where the last reference goes while the lock is held
        buffers.clear()
    deadline = time.monotonic() + 5
    while os.fstat(memory.fd).st_size and time.monotonic() < deadline:
        time.sleep(0.05)
    assert os.fstat(memory.fd).st_size == 0
    assert not memory._buffers


def test_buffers_together_are_bounded(memory, monkeypatch) -> None:
    monkeypatch.setattr(shared_payloads, "MAX_BUFFER_BYTES", 2 * LARGE)
    first, second = memory.buffer(LARGE), memory.buffer(LARGE)
    assert first is not None
    assert second is not None
    assert memory.buffer(LARGE) is None
    assert memory.place({"a": torch.ones(LARGE)}) is not None  # what is here already is no buffer
    del first
    assert memory.buffer(LARGE) is not None


def test_the_short_tensors_of_a_step_wait_for_nobody(memory) -> None:
    with memory._lock:  # held where pages are made
        assert memory.place({"a": torch.ones(9)}) is None


def test_a_bucket_that_fails_keeps_no_room(memory) -> None:
    """Before the garbage collector comes by: an idle engine may be long without one."""
    taken = []

    class Channel:
        def begin(self, request):
            return Begun(update_id="u", epoch=1, base_version=0, version=1)

        def buffer(self, nbytes):
            taken.append(nbytes)
            return memory.buffer(nbytes)

        def bucket(self, header, payload):
            raise TransferFailed("refused")

        def close(self): ...

    header = BucketHeader(0, (), LARGE)
    announced = to_json(header)
    request = UpdateRequest(update_id="u", bucket_bytes=LARGE, timeout=5.0)
    commands = [
        pb.UpdateCommand(begin=document(to_plain(request))),
        pb.UpdateCommand(bucket=pb.Bucket(header_json=announced, payload_bytes=LARGE)),
        pb.UpdateCommand(chunk=bytes(LARGE)),
    ]

    async def feed():
        for command in commands:
            yield command
        await asyncio.sleep(60)

    async def talk():
        with pytest.raises(TransferFailed, match="refused"):
            async for _ in UpdateStream(Channel(), HeldUpdates()).talk(feed()):
                pass

    gc.disable()
    try:
        asyncio.run(talk())
        assert taken == [LARGE]
        deadline = time.monotonic() + 5
        while not memory._left and time.monotonic() < deadline:
            time.sleep(0.01)
        assert memory._left
    finally:
        gc.enable()


def test_both_ranks_of_an_engine_load_what_lies_there(tiny, monkeypatch) -> None:
    monkeypatch.setattr(shared_payloads, "MIN_SHARED", 1)
    placed = []
    place = PayloadMemory.place

    def noting(self, tensors):
        placed.append(place(self, tensors))
        return placed[-1]

    monkeypatch.setattr(PayloadMemory, "place", noting)
    weights = {n: t * 2 for n, t in load_file(tiny[0] / "model.safetensors").items()}
    with Rollout(
        str(tiny[0]), tensor_parallel_size=2, device="cpu", num_threads=1, dtype="float32",
        skip_tokenizer_init=True, num_kv_blocks=64, max_model_len=64,
    ) as engine:  # fmt: skip
        engine.update_weights(weights, transport="inline", bucket_bytes=16 << 10)
        assert engine.check_weights(weights).equal
    assert len([found for found in placed if found is not None]) > 3
