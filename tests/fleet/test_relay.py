"""What a peer that feeds an update may say, and what it is refused."""

import asyncio
import threading

import pytest
import torch

from rollout.errors import TransferFailed
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.chunks import Chunk
from rollout.rpc.client import RolloutClient
from rollout.server.grpc import weights
from rollout.server.grpc.relay import DUE, Forwarder, Relay, Relays
from rollout.weight_sync.protocol.link import Forward
from rollout.weight_sync.protocol.messages import BucketHeader, Message
from rollout.wire.codec import to_json


@pytest.fixture
def relay():
    """With what it delivers: (bucket, its bytes)."""
    delivered = []
    found = Relay(
        lambda index, nbytes: torch.zeros(nbytes, dtype=torch.uint8),
        lambda header, memory: delivered.append((header.index, bytes(memory.tolist()))),
        limit=64,
    )
    found.delivered = delivered
    found.join()
    yield found
    found.close()


def bucket(index, nbytes, *messages):
    header = to_json(BucketHeader(index, (), nbytes, messages))
    return pb.UpdateCommand(bucket=pb.Bucket(header_json=header, payload_bytes=nbytes))


def test_a_bucket_is_delivered_once_it_is_announced_and_whole(relay):
    relay.take(bucket(0, 4))
    relay.take(Chunk(b"ab"))
    relay.expect(BucketHeader(0, (), 4))
    assert relay.delivered == []
    relay.take(Chunk(b"cd"))
    assert relay.brought(0, 20.0) == ("", 0)
    assert relay.delivered == [(0, b"abcd")]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([bucket(1, 4)], "bucket 1 comes out of turn"),
        ([bucket(0, 4), Chunk(b"12345")], "bucket 0 is longer than it announced"),
        ([bucket(0, 65)], "65"),
        ([bucket(0, 65, Message(0, 0, 0, 0, ()))], "has messages"),
        ([Chunk(b"1")], "not chunk"),
        ([bucket(0, 4), bucket(1, 4)], "not bucket"),
        ([pb.UpdateCommand()], "not None"),
        ([bucket(0, 1), Chunk(b"1"), bucket(1, 1), Chunk(b"1"), bucket(2, 1)], "out of turn"),
    ],
)
def test_a_feed_that_says_what_it_may_not_is_refused(relay, said, why):
    for command in said[:-1]:
        relay.take(command)
    with pytest.raises(TransferFailed, match=why):
        relay.take(said[-1])


def test_announcements_without_bytes_are_few(relay):
    for index in range(DUE):
        relay.expect(BucketHeader(index, (), 4))
    with pytest.raises(TransferFailed, match="wait for one of them first"):
        relay.expect(BucketHeader(DUE, (), 4))


def test_bytes_of_the_updates_own_stream_take_the_place_of_what_a_feed_announced_wrongly(relay):
    relay.take(bucket(0, 7))
    relay.take(Chunk(b"1234567"))
    assert relay.start(0, 4).numel() == 4
    with pytest.raises(TransferFailed, match="own stream brings the bytes"):
        relay.take(bucket(1, 4))


def test_a_bucket_that_is_not_as_long_as_announced_fails_the_update(relay):
    relay.take(bucket(0, 3))
    relay.take(Chunk(b"123"))
    relay.expect(BucketHeader(0, (), 4))
    with pytest.raises(TransferFailed, match="not as long as it was announced"):
        relay.brought(0, 20.0)
    assert relay.delivered == []


def test_one_feed_alone_that_knows_the_secret_is_let_in(relay):
    relays = Relays()
    relays.add("u1", relay)
    for update_id, secret in (("u1", ""), ("u1", "x\u00e9"), ("u2", relay.secret)):
        with pytest.raises(TransferFailed, match="takes no feed here"):
            relays.find(pb.Feed(update_id=update_id, secret=secret))
    assert relays.find(pb.Feed(update_id="u1", secret=relay.secret)) is relay
    with pytest.raises(TransferFailed, match="has a feed already"):
        relay.join()


def test_a_connection_by_which_nothing_comes_any_more_is_let_go(relay, monkeypatch):
    async def silent():
        await asyncio.sleep(60)
        yield

    monkeypatch.setattr(weights, "GONE", 0.05)
    relay.expect(BucketHeader(0, (), 4))
    with pytest.raises(TransferFailed, match="no sign of life"):
        asyncio.run(weights._fed(relay, silent()))
    why, first = relay.brought(0, 20.0)
    assert ("no sign of life" in why, first) == (True, 0)


def test_a_relay_ends_without_the_connection_of_its_feed(relay, monkeypatch):
    """Its end may wait for seconds: for bytes on their way to a host that does not get them."""
    go, closed = threading.Event(), threading.Event()

    def close(client):
        go.wait(20)
        closed.set()

    monkeypatch.setattr(RolloutClient, "close", close)
    monkeypatch.setattr(RolloutClient, "feed", lambda client, commands, limit: None)
    wanted = Forward(address="127.0.0.1:1", update_id="u1", secret="secret", timeout=1.0)
    relay.forward(Forwarder(wanted, None))
    relay.close()
    assert not closed.is_set()
    go.set()
    assert closed.wait(20)
