"""One stream per trainer rank to a service's one port: no gather, and a cut on any of them."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest
from proxies import Proxy
from tiny_models import write_tiny
from trainer import nudged
from trainer_ranks import CountedGathers, DeltaTrainerRanks, drifted, whole

from rollout import AsyncRollout, Rollout
from rollout.errors import ChecksumMismatch, TransferFailed
from rollout.fleet.coordination.record import Record
from rollout.fleet.fleet import Fleet
from rollout.fleet.fronts.backend import FleetBackend
from rollout.fleet.fronts.routed_fleet import RoutedFleet
from rollout.fleet.fronts.routing_front import RoutingFront
from rollout.rpc.client import RolloutClient
from rollout.weight_sync.protocol.messages import UpdateRequest
from rollout.weight_sync.transports.inline import GrpcStream

BUCKET = 16 << 10
ENGINE = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 32, "max_model_len": 128}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path)
    with Rollout(str(path), dtype="float32", **ENGINE) as rollout:
        yield rollout


@pytest.fixture(scope="module")
def weights(tmp_path_factory, engine):
    state = write_tiny(tmp_path_factory.mktemp("other"), seed=1).state_dict()
    names = {meta.name for meta in engine.weight_info().tensors}
    return {name: tensor.clone() for name, tensor in state.items() if name in names}


class Service:
    """The service as each rank reaches it, through a proxy of its own."""

    def __init__(self, address, ranks, cuts=()):
        self.proxies = [Proxy(address, cuts[rank] if cuts else ()) for rank in range(ranks)]
        self.links = [RolloutClient(proxy.address) for proxy in self.proxies]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for part in (*self.links, *self.proxies):
            part.__exit__() if isinstance(part, Proxy) else part.close()


def send(ranks, weights, service, **options):
    options = {"transport": "grpc_stream", "bucket_bytes": BUCKET, **options}
    return ranks.send(weights, links=service.links, **options)


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_sends_its_part_on_its_own_stream(engine, weights, size) -> None:
    ranks = DeltaTrainerRanks(engine, size)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    with Service(engine.address, size) as service:
        full = send(ranks, weights, service, encoding="full")
        assert CountedGathers.gathers == 0
        assert engine.check_weights(weights).equal
        assert (full.transport, full.details["encoding"]) == ("grpc_stream", "full")
        shares = [int(part) for part in full.details["sent_bytes"].split(",")]
        assert sum(shares) == full.wire_bytes >= nbytes
        for share, proxy in zip(shares, service.proxies, strict=True):
            assert share <= proxy.up <= share + (64 << 10)
            assert share <= 1.2 * nbytes / size

        send(ranks, weights, service, encoding="delta")  # kept by every rank
        moved = nudged(weights, 0.01)
        before = [proxy.up for proxy in service.proxies]
        delta = send(ranks, moved, service, encoding="delta")
        assert CountedGathers.gathers == 0
        assert delta.details["encoding"] == "delta"
        assert delta.wire_bytes <= 0.04 * nbytes
        assert engine.check_weights(moved).equal
        for start, proxy in zip(before, service.proxies, strict=True):
            assert 0 < proxy.up - start <= 0.04 * nbytes + (64 << 10)


@pytest.mark.parametrize("transport", ["grpc_stream", "p2p", "ipc", "broadcast"])
def test_buckets_are_as_long_as_the_first_rank_says(engine, weights, transport) -> None:
    ranks, sent = DeltaTrainerRanks(engine, 2), weights
    rising, falling = (BUCKET, 2 * BUCKET), (2 * BUCKET, BUCKET)
    with Service(engine.address, 2) as service:
        for sizes, encoding in ((rising, "delta"), (rising, "delta"), (falling, "full")):
            receipt = send(
                ranks, sent, service, transport=transport, encoding=encoding,
                of_rank=lambda rank, sizes=sizes: {"bucket_bytes": sizes[rank]},
            )  # fmt: skip
            assert receipt.transport == transport
            assert engine.check_weights(sent).equal
            sent = nudged(sent, 0.01)


@pytest.mark.parametrize("which", [0, 1])
def test_a_cut_of_one_stream_costs_that_stream_a_bucket(engine, weights, which) -> None:
    ranks, moved = DeltaTrainerRanks(engine, 2), nudged(weights, 0.5, which)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    cuts = [(nbytes // 4,) if rank == which else () for rank in range(2)]
    with Service(engine.address, 2, cuts) as service:
        receipt = send(ranks, moved, service, encoding="full")
        share = int(receipt.details["sent_bytes"].split(",")[which])
        cut = service.proxies[which]
        assert cut.cuts == 1
        assert share <= cut.up <= share + BUCKET + (64 << 10)
    assert engine.check_weights(moved).equal


@pytest.mark.parametrize("which", [0, 1])
def test_a_stream_that_is_lost_for_good_fails_every_rank(engine, weights, which) -> None:
    ranks, live = DeltaTrainerRanks(engine, 2), engine.weight_version
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    cuts = [(nbytes // 4,) if rank == which else () for rank in range(2)]
    with Service(engine.address, 2, cuts) as service:
        service.proxies[which].refuse_after_cut = True
        started = time.monotonic()
        with pytest.raises(TransferFailed):
            send(ranks, nudged(weights, 0.5), service, transport=GrpcStream(0.5), encoding="full")
        assert time.monotonic() - started < 25
        deadline = time.monotonic() + 25
        while engine.weight_info().state != "idle":
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert engine.weight_version == live
    assert engine.update_weights(weights).version == live + 1


@pytest.mark.parametrize(("transport", "encoding"), [
    ("grpc_stream", "full"), ("grpc_stream", "delta"), ("inline", "delta"),
])  # fmt: skip
def test_whole_copies_that_have_drifted_apart_are_refused(
    engine, weights, transport, encoding
) -> None:
    """Each rank sends a part: a mixture of both would go live."""
    ranks = DeltaTrainerRanks(engine, 3, whole)
    with Service(engine.address, 3) as service:
        way = {"links": service.links, "transport": transport, "encoding": encoding}
        live = ranks.send(weights, **way).version
        with pytest.raises(ChecksumMismatch, match=r"norm\.weight \(ranks 0 and 2\)"):
            ranks.send(nudged(weights, 0.01), prepare=drifted, **way)
        assert engine.weight_version == live
        assert engine.check_weights(weights).equal
        assert ranks.send(nudged(weights, 0.01), **way).version == live + 1
        assert engine.check_weights(nudged(weights, 0.01)).equal


def test_a_stream_joins_by_the_secret_and_once(engine, weights) -> None:
    client = RolloutClient(engine.address)
    channel = client.open()
    begun = UpdateRequest(
        update_id="mine", bucket_bytes=BUCKET, timeout=5.0, transport="grpc_stream",
        offer={"grace": 5.0, "senders": 3},
    )  # fmt: skip
    channel.begin(begun)
    with pytest.raises(TransferFailed, match="is not held here"):
        client.join(begun, "guessed", 1)
    lane = client.join(begun, channel.secret, 1)
    for number in (0, 1, 3):
        with pytest.raises(TransferFailed, match=f"lane {number} of update mine is taken, or"):
            client.join(begun, channel.secret, number)
    with pytest.raises(TransferFailed, match="does not commit"):
        lane.commit()
    # A stream that ends without having said that all was sent takes the update with it.
    deadline = time.monotonic() + 25
    while engine.weight_info().state != "idle":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(TransferFailed, match="the stream of trainer rank 1"):
        channel.wait(0, 5.0)
    for part in (lane, channel, client):
        part.close()
    assert engine.weight_info().state == "idle"


@pytest.mark.parametrize(
    "by", ["that coordinates", pytest.param("that routes only", marks=pytest.mark.more)]
)
def test_every_rank_sends_its_part_to_a_front_of_a_fleet(weights, tmp_path, by) -> None:
    """Streams are the ranks' own up to there, and take turns behind it."""
    write_tiny(tmp_path / "tiny")
    with ExitStack() as stack:
        members = [
            stack.enter_context(Rollout(str(tmp_path / "tiny"), dtype="float32", **ENGINE))
            for _ in range(2)
        ]
        fleet = Fleet(Record(tmp_path / "record", 2.5), lease=2.5)
        for member in members:
            fleet.add(member.address)
        front = Rollout.over(lambda: AsyncRollout.over(FleetBackend(fleet)))
        stack.callback(front.shutdown)
        fleet.wait_serving(2, 60.0)
        if by == "that routes only":
            of = RoutedFleet(RolloutClient(front.address))
            front = Rollout.over(lambda: AsyncRollout.over(RoutingFront(of)))
            stack.callback(front.shutdown)
        ranks, sent = DeltaTrainerRanks(members[0], 3), weights
        with Service(front.address, 3) as service:
            for _ in range(2):
                receipt = send(ranks, sent, service, encoding="full")
                assert set(receipt.details["members"].values()) == {"committed"}
                assert len(receipt.details["sent_bytes"].split(",")) == 3
                assert all(member.check_weights(sent).equal for member in members)
                sent = nudged(sent, 0.01)
