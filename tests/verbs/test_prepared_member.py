"""A member of a fleet: prepared over one connection, decided over another, serving meanwhile."""

from __future__ import annotations

import uuid

import pytest
from proxies import Proxy

from rollout.errors import UpdateInProgress, VersionConflict
from rollout.kernels import digest
from rollout.rpc.client import RolloutClient
from rollout.weight_sync.protocol.bucket_packer import BucketPacker
from rollout.weight_sync.protocol.link import StreamOffer
from rollout.weight_sync.protocol.messages import Decision, Seal, UpdateRequest
from rollout.weights import Box
from rollout.wire.codec import to_plain

# A fleet decides by itself.
of_one_engine = pytest.mark.parametrize("engine", [(2, 1)], indirect=True, ids=["tp2"])


def prepare(client: RolloutClient, weights, fence: int, grace: float) -> str:
    packer, channel = BucketPacker(1 << 20), client.open()
    request = UpdateRequest(
        update_id=uuid.uuid4().hex,
        transport="grpc_stream",
        offer=to_plain(StreamOffer(grace=grace)),
        bucket_bytes=1 << 20,
        timeout=20.0,
    )
    channel.begin(request)
    made = [bucket for item in weights.items() for bucket in packer.add(*item)]
    for header, payload in [*made, *packer.flush()]:
        channel.bucket(header, payload)
        channel.wait(header.index, 20.0)
    digests = {name: digest(t, t.shape, Box.full(t.shape)) for name, t in weights.items()}
    channel.seal(Seal(num_buckets=packer.num_buckets, digests=digests, fence=fence))
    return request.update_id


@of_one_engine
@pytest.mark.parametrize(
    ("commit", "grace"), [(True, 5.0), pytest.param(False, 0.0, marks=pytest.mark.more)]
)
def test_a_member_keeps_its_vote_without_a_connection(engine, weights, commit, grace) -> None:
    engine.rollout.update_weights(dict(weights[1]))
    before, tokens = engine.info(), engine.tokens()
    fence = before["fence"] + 2
    with Proxy(engine.served.grpc) as proxy:
        name = prepare(RolloutClient(proxy.address), dict(weights[2]), fence, grace)
    # The proxy has gone, and reset every connection through it.
    info = engine.info()
    assert (info["state"], info["prepared"], info["fence"]) == ("prepared", name, fence)
    assert engine.http.get("/health").json() == {"status": "running", "prepared": name}
    assert engine.tokens() == tokens
    assert engine.info()["version"] == before["version"]
    with pytest.raises(UpdateInProgress, match="prepared"):
        engine.rollout.update_weights(dict(weights[1]), timeout=2)
    with pytest.raises(UpdateInProgress, match="no sleep"):
        engine.rollout.sleep()
    other = RolloutClient(engine.served.grpc)
    with pytest.raises(VersionConflict, match="is stale"):
        other.decide(Decision(update_id=name, commit=commit, fence=fence - 1))
    receipts = [
        other.decide(Decision(update_id=name, commit=commit, fence=fence)) for _ in range(2)
    ]
    other.close()
    assert receipts[0] == receipts[1]
    assert (receipts[0] is not None) == commit
    live = weights[2] if commit else weights[1]
    assert engine.rollout.check_weights(dict(live)).equal
    assert engine.info()["version"] == before["version"] + commit
    assert (engine.tokens() != tokens) == commit
    assert engine.http.get("/health").json() == {"status": "running"}


@of_one_engine
@pytest.mark.more
def test_an_operator_ends_what_nobody_decides(engine, weights) -> None:
    engine.rollout.update_weights(dict(weights[1]))
    before = engine.info()
    client = RolloutClient(engine.served.grpc)
    name = prepare(client, dict(weights[2]), before["fence"], 0.0)
    client.close()
    said = engine.http.post("/abort_weight_update").json()["message"]
    assert f"update {name} is prepared" in said
    assert "its update_id" in said
    assert engine.info()["state"] == "prepared"
    said = engine.http.post("/abort_weight_update", json={"update_id": name}).json()
    assert said["message"] == "Weight update aborted"
    assert engine.info() == before
