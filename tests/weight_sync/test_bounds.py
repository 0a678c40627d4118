"""What was agreed on at begin holds for every bucket, and before memory is made for it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from engine_ranks import same
from manual_update import BUCKET, ManualUpdate
from trainer import Trainer

from rollout.distributed import Rendezvous
from rollout.errors import TransferFailed
from rollout.weight_sync.protocol.committed import DeltaBase
from rollout.weight_sync.protocol.messages import (
    BucketHeader,
    Message,
    UpdateRequest,
)
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.transports import find
from rollout.weight_sync.transports.base import EngineRank
from rollout.wire.codec import to_plain

HUGE = 1 << 45  # bytes: no machine has them
PLACE = Rendezvous(host="127.0.0.1", port=9, secret="s", size=3, backend="gloo")
GROUP = {"rendezvous": to_plain(PLACE)}
MEMORY = {"name": f"rollout-ipc-1-{'0' * 32}", "secret": "0" * 32, "half": 4096}


@pytest.mark.parametrize("nbytes", [BUCKET + 1, HUGE])
def test_the_engine_announces_no_larger_bucket_than_was_agreed_on(
    engine, checkpoints, nbytes
) -> None:
    before = engine.live()
    hand = ManualUpdate(engine, checkpoints[2])
    hand.begin()
    for header in (
        BucketHeader(0, (), nbytes),
        BucketHeader(0, (), 0, (Message(0, 1, 0, nbytes, ()),)),
    ):
        with pytest.raises(TransferFailed, match=f"over the agreed {BUCKET}"):
            hand.channel.bucket(header, None)
    hand.channel.close()
    assert same(engine.live(), before)
    assert Trainer(engine, "inline").send(checkpoints[2]).version == 1


@pytest.mark.parametrize(
    ("name", "offer", "messages"),
    [
        ("broadcast", GROUP, ()),
        ("p2p", {**GROUP, "senders": 1, "known": ""}, (Message(0, 0, 0, HUGE, ()),)),
        ("ipc", MEMORY, ()),
        ("inline", {}, ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rank_makes_no_memory_for_a_larger_one(name, offer, messages) -> None:
    header = BucketHeader(0, (), HUGE, messages)
    request = UpdateRequest(
        update_id="u", transport=name, offer=offer, bucket_bytes=4096, timeout=1.0
    )
    receiver = find(name).receiver(request, EngineRank(0, "cpu"))
    with pytest.raises(TransferFailed):
        receiver.receive(header, None, 1.0)
    receiver.close()


def test_buckets_announced_without_waiting_do_not_pile_up_at_the_ranks(engine, checkpoints) -> None:
    hand = ManualUpdate(engine, checkpoints[2], timeout=60.0)
    hand.begin()
    rank, opened, sent = engine.ranks[1], threading.Event(), []
    honest = rank.stage_bucket

    def held(args, tensors):
        assert opened.wait(60)
        return honest(args, tensors)

    rank.stage_bucket = held

    def announce() -> None:
        for header, payload in hand.buckets:
            hand.channel.bucket(header, payload)
            sent.append(header.index)

    thread = threading.Thread(target=announce)
    thread.start()
    deadline = time.monotonic() + 30
    while len(sent) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(0.1)  # in which more could come
    assert len(sent) == 4 < len(hand.buckets) - 2
    opened.set()
    thread.join(60)
    assert len(sent) == len(hand.buckets)
    hand.sent = len(sent)
    hand.seal()
    assert hand.commit().version == 1


# ---- "auto" is what the engine was started with ----


def test_an_engine_that_set_no_shadow_aside_builds_none_by_itself(engine, checkpoints) -> None:
    served = replace(engine.coordinator.served, staging="none")  # as its configuration says
    engine.coordinator.served = served
    base = DeltaBase()

    def send(weights, **options):
        options = UpdateOptions(bucket_bytes=BUCKET, timeout=30.0, **options)
        return publish(weights, connect=lambda: engine, options=options, base=base)

    send(checkpoints[2], encoding="delta")
    assert not any(rank.instances.has_shadow for rank in engine.ranks)
    assert engine.gates == ["hold", "release"]
    receipt = send(checkpoints[1], encoding="delta")
    assert receipt.details["encoding"] == "full"
    assert "started with staging='none'" in receipt.details["encoding_reason"]
    assert not any(rank.instances.has_shadow for rank in engine.ranks)
    send(checkpoints[2], staging="device")  # asked for
    assert all(rank.instances.has_shadow for rank in engine.ranks)


# ---- what the receipt says, and to whom ----


def test_the_receipt_that_is_returned_is_the_one_that_the_engine_keeps(engine, checkpoints) -> None:
    receipt = Trainer(engine, "inline").send(checkpoints[2])
    assert receipt == engine.receipts()[-1]
