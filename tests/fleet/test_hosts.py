"""The bytes of an update reach each host once; its members share them there."""

import socket
from contextlib import ExitStack
from dataclasses import replace
from uuid import uuid4

import pytest
import torch
from fleet_front import ENGINE, LEASE, Front
from proxies import Proxy
from tiny_models import write_tiny

from rollout import Rollout
from rollout.cli.plan_fleet import plan_fleet
from rollout.errors import ConfigError, EngineClosed, TransferFailed
from rollout.fleet.link import Link
from rollout.fleet.updates import channel
from rollout.fleet.updates.hosts import CardMemory
from rollout.fleet.updates.ways import ways
from rollout.rpc.update_channel import GrpcWeightChannel
from rollout.server.grpc import relay
from rollout.server.grpc.relay import Forwarder
from rollout.server.grpc.sharing import SharingChannel
from rollout.weight_sync.protocol.membership import SendTo
from rollout.weight_sync.protocol.messages import Mappers, UpdateRequest, WeightInfo
from rollout.weight_sync.transports import shared_memory
from rollout.weight_sync.transports.cuda_ipc import SharedAllocation
from rollout.weight_sync.transports.cuda_memory import FLAGS, pack_handle
from rollout.weight_sync.transports.host import host_id
from rollout.wire.codec import to_plain

WAIT = 30.0  # seconds: for hangs
OPTIONS = {"bucket_bytes": 64 << 10, "timeout": WAIT}


@pytest.fixture
def spread_out(engines, checkpoint):
    """Three engines and one more; the last two are of another host, says their announcement."""
    with Rollout(checkpoint, **ENGINE) as fourth:
        members = [*engines, fourth]
        for member in members[2:]:
            member._async.backend._coordinator._host = "another-host"
        yield members


@pytest.fixture
def sent(monkeypatch):
    """Bytes of buckets that have left over gRPC, by address."""
    found = {}
    bucket = GrpcWeightChannel.bucket

    def counted(self, header, payload):
        found.setdefault(self._address, 0)
        found[self._address] += 0 if payload is None else payload.nbytes
        bucket(self, header, payload)

    monkeypatch.setattr(GrpcWeightChannel, "bucket", counted)
    return found


@pytest.mark.parametrize("transport", ["inline", "ipc"])
def test_each_host_gets_each_byte_once(spread_out, sent, tmp_path, trained, transport):
    front = Front(tmp_path / "record", spread_out)
    try:
        front.fleet.wait_serving(4, WAIT)
        receipt = front.rollout.update_weights(trained, transport=transport, **OPTIONS)
        assert receipt.details["members"] == dict.fromkeys(front.names, "committed")
        here, there = front.names[:2], front.names[2:]
        once = receipt.wire_bytes
        assert once >= receipt.num_bytes
        assert receipt.details["front_sent_bytes"] == {
            **dict.fromkeys(here, 0), there[0]: once, there[1]: 0,
        }  # fmt: skip
        assert sent == receipt.details["front_sent_bytes"]
        assert receipt.details["members_map"] == {
            **dict.fromkeys(here, "the front"), there[1]: there[0],
        }  # fmt: skip
        check_plan(receipt, front.names, hosts=2, among=True)
        assert all(one.check_weights(trained).equal for one in spread_out)
    finally:
        front.close()


@pytest.mark.parametrize("when", [pytest.param("begin", marks=pytest.mark.more), "bucket 3"])
def test_a_member_whose_neighbours_read_its_memory_may_die(
    spread_out, sent, tmp_path, trained, monkeypatch, when
):
    front = Front(tmp_path / "record", spread_out, quorum=3)
    begin, bucket = SharingChannel.begin, SharingChannel.bucket

    def begins(self, request):
        if when == "begin":
            raise TransferFailed("it is gone")
        return begin(self, request)

    def takes(self, header, payload):
        if when == f"bucket {header.index}":
            raise TransferFailed("it is gone")
        bucket(self, header, payload)

    monkeypatch.setattr(SharingChannel, "begin", begins)
    monkeypatch.setattr(SharingChannel, "bucket", takes)
    try:
        front.fleet.wait_serving(4, WAIT)
        receipt = front.rollout.update_weights(trained, transport="inline", **OPTIONS)
        first, second = front.names[2:]
        assert receipt.details["members"].pop(first).startswith("fenced")
        assert set(receipt.details["members"].values()) == {"committed"}
        whole = receipt.wire_bytes
        rest = whole - 3 * OPTIONS["bucket_bytes"] if when != "begin" else whole
        assert rest <= sent[second] <= whole - (when != "begin")
        left = [one for one, name in zip(spread_out, front.names, strict=True) if name != first]
        assert all(one.check_weights(trained).equal for one in left)
        front.fleet.wait_serving(4, WAIT)  # which another has brought up to date
        assert spread_out[2].check_weights(trained).equal
    finally:
        front.close()


@pytest.fixture
def far(spread_out):
    """Four engines on three hosts, none of which is the front's, say their announcements."""
    for member, host in zip(spread_out, ("one", "one", "two", "three"), strict=True):
        member._async.backend._coordinator._host = host
    return spread_out


def check_plan(receipt, names, hosts, among):
    """What ``rollout plan`` says of such a fleet is what came to pass."""
    size = receipt.num_bytes
    plan = plan_fleet(
        size, size, members=len(names), hosts=hosts, among=among, gpu=False,
        bucket_bytes=OPTIONS["bucket_bytes"], bandwidths=(1.0,),
    )  # fmt: skip
    said = {f"member {n}": name for n, name in enumerate(names)}
    ways = {}
    for name, way in plan.ways.items():
        source = way.removeprefix("maps ")
        ways[said[name]] = way.removesuffix(source) + said.get(source, source)
    maps = {name: f"maps {of}" for name, of in receipt.details["members_map"].items()}
    assert ways == {**told(receipt), **maps}
    padding = 64 * 100  # of an entry
    assert 0 <= sum(receipt.details["front_sent_bytes"].values()) - plan.front_sends < padding
    assert plan.host_receives == size


def told(receipt):
    return receipt.details["members_fed_by"]


def test_hosts_take_the_bytes_on_to_the_next(far, sent, tmp_path, trained):
    front = Front(tmp_path / "record", far)
    try:
        front.fleet.wait_serving(4, WAIT)
        first, second, third, fourth = front.names
        for encoding in ("full", "delta"):
            sent.clear()
            receipt = front.rollout.update_weights(trained, encoding=encoding, **OPTIONS)
            assert receipt.details["members"] == dict.fromkeys(front.names, "committed")
            once = receipt.wire_bytes
            expected = {first: once, second: 0, third: 0, fourth: 0}
            assert receipt.details["front_sent_bytes"] == expected
            assert sent == expected
            assert receipt.details["members_map"] == {second: first}
            assert told(receipt) == {first: "the front", third: first, fourth: third}
            if encoding == "full":
                check_plan(receipt, front.names, hosts=3, among=False)
            assert all(one.check_weights(trained).equal for one in far)
    finally:
        front.close()


def test_a_feed_that_breaks_off_is_gone_on_with_by_the_front(
    far, sent, tmp_path, trained, monkeypatch
):
    front = Front(tmp_path / "record", far)
    command, begun = Forwarder.command, []

    def fails(self, memory, have):
        # The first of the two, within bucket 3: with its announcement it ends.
        begun[:] = begun or [self]
        if self is begun[0] and self.index >= 3 and self._at >= 0:
            raise OSError("no more")
        return command(self, memory, have)

    monkeypatch.setattr(Forwarder, "command", fails)
    try:
        front.fleet.wait_serving(4, WAIT)
        receipt = front.rollout.update_weights(trained, **OPTIONS)
        assert receipt.details["members"] == dict.fromkeys(front.names, "committed")
        first, _, *others = front.names
        cut = next(name for name in others if "the front from bucket" in told(receipt)[name])
        whole, size = receipt.wire_bytes, OPTIONS["bucket_bytes"]
        assert "the front from bucket 3 on: " in told(receipt)[cut]
        assert sent[first] == whole
        assert whole - 4 * size < sent[cut] <= whole - 2 * size
        assert all(one.check_weights(trained).equal for one in far)
    finally:
        front.close()


def test_a_host_that_the_others_do_not_reach_or_are_too_old_for_is_sent_to_by_the_front(
    far, sent, tmp_path, trained, monkeypatch
):
    front = Front(tmp_path / "record", far)
    forwarding = Link.forwarding
    monkeypatch.setattr(
        Link, "forwarding", lambda *given: replace(forwarding(*given), address="127.0.0.1:1")
    )
    try:
        front.fleet.wait_serving(4, WAIT)
        first, second, third, fourth = front.names
        receipt = front.rollout.update_weights(trained, **OPTIONS)
        once = receipt.wire_bytes
        assert sent == {first: once, second: 0, third: once, fourth: once}
        assert told(receipt)[first] == "the front"
        assert "does not reach it: " in told(receipt)[third]
        assert "127.0.0.1:1" in told(receipt)[third]
        monkeypatch.undo()
        front.fleet.links()[2].relays = False  # as one that knows nothing of it says
        receipt = front.rollout.update_weights(trained, **OPTIONS)
        assert told(receipt) == {first: "the front", third: "the front", fourth: first}
        assert receipt.details["members"] == dict.fromkeys(front.names, "committed")
        assert all(one.check_weights(trained).equal for one in far)
    finally:
        front.close()


def test_a_host_that_is_silent_to_the_others_costs_their_patience_once(
    far, tmp_path, trained, monkeypatch
):
    front = Front(tmp_path / "record", far)
    forwarding = Link.forwarding
    monkeypatch.setattr(relay, "CONNECT", 2.5)
    with ExitStack() as stack:
        stack.callback(front.close)
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        host, port = silent.getsockname()
        for _ in range(3):  # the queue is full, and who comes now gets no answer
            guest = stack.enter_context(socket.socket())
            guest.setblocking(False)
            guest.connect_ex((host, port))
        monkeypatch.setattr(
            Link, "forwarding", lambda *given: replace(forwarding(*given), address=f"{host}:{port}")
        )
        front.fleet.wait_serving(4, WAIT)
        first, _, third, _ = front.names
        ways = [told(front.rollout.update_weights(trained, **OPTIONS))[third] for _ in range(2)]
    assert ways[0].startswith(f"the front: {first} does not reach it: no answer within 2.5 s; ")
    assert ways[1] == f"the front: {first} did not reach it lately"


def test_a_way_between_hosts_that_loses_the_bytes_costs_an_update_its_patience_once(
    far, tmp_path, trained, monkeypatch
):
    """What connects them may carry short packets alone."""
    monkeypatch.setattr(relay, "SILENCE", (0.5, 0.5))
    monkeypatch.setattr(channel, "SILENT", 0.4)
    front = Front(tmp_path / "record", far)
    forwarding = Link.forwarding
    with ExitStack() as stack:
        stack.callback(front.close)
        third = front.names[2]
        way = stack.enter_context(Proxy(third))
        way.longest = 1400

        def forwards(link, *given):
            wanted = forwarding(link, *given)
            return replace(wanted, address=way.address) if link.name == third else wanted

        monkeypatch.setattr(Link, "forwarding", forwards)
        front.fleet.wait_serving(4, WAIT)
        receipts = [front.rollout.update_weights(trained, **OPTIONS) for _ in range(2)]
    ways = [told(receipt)[third] for receipt in receipts]
    assert ways[0].endswith("the front from bucket 0 on: no sign of life for 0.5 s")
    assert ways[1] == f"the front: {front.names[0]} did not reach it lately"
    assert all(set(one.details["members"].values()) == {"committed"} for one in receipts)


def test_a_member_says_that_it_does_not_reach_the_one_that_it_is_to_bring_up_to_date(engines):
    wanted = SendTo(address="127.0.0.1:1", version=0, timeout=1.0)
    with pytest.raises(
        TransferFailed, match=r"127.0.0.1:1 does not answer this .*reach each other"
    ):
        engines[0]._async.backend.send_to(wanted)
    itself = replace(wanted, address=engines[0].address)
    with pytest.raises(TransferFailed, match="leads this member to itself, as loopback does; "):
        engines[0]._async.backend.send_to(itself)


@pytest.mark.more
def test_members_of_a_host_without_room_take_the_bytes_on_to_each_other(
    spread_out, sent, tmp_path, trained, monkeypatch
):
    front = Front(tmp_path / "record", spread_out)

    def full(self):
        raise TransferFailed("the mount is full")

    monkeypatch.setattr("rollout.weight_sync.transports.shared_memory.IpcSender._create", full)
    try:
        front.fleet.wait_serving(4, WAIT)
        receipt = front.rollout.update_weights(trained, transport="inline", **OPTIONS)
        assert sorted(sent.values()) == [0, 0, 0, receipt.wire_bytes]
        assert receipt.details["members"] == dict.fromkeys(front.names, "committed")
        assert receipt.details["members_map"] == {}
        assert all(one.check_weights(trained).equal for one in spread_out)
    finally:
        front.close()


def test_who_came_later_shares_too_and_nobody_is_asked_for_what_others_need(
    engines, tmp_path, trained, monkeypatch
):
    front = Front(tmp_path / "record", engines[:2])

    def gone():
        raise EngineClosed("it is gone")

    try:
        front.fleet.wait_serving(2, WAIT)
        front.rollout.update_weights(trained, transport="inline", **OPTIONS)
        front.fleet.add(engines[2].address)
        front.fleet.wait_serving(3, WAIT)  # which another has brought up to date
        info = front.fleet.ask_any(lambda client: client.info())
        for link in front.fleet.links()[:2]:
            monkeypatch.setattr(link.client, "info", gone)
        monkeypatch.setattr(front.fleet, "ask_any", lambda verb: info)
        receipt = front.rollout.update_weights(trained, transport="inline", **OPTIONS)
        names = [link.name for link in front.fleet.links()]
        assert receipt.details["members"] == dict.fromkeys(names, "committed")
        assert receipt.details["members_map"] == dict.fromkeys(names, "the front")
    finally:
        front.close()


@pytest.mark.more
def test_tensors_that_are_tied_fit_the_shared_memory_once_more(tmp_path):
    model = write_tiny(tmp_path / "tied", tied=True, vocab_size=2000, num_layers=1)
    with (
        Rollout(str(tmp_path / "tied"), **ENGINE) as one,
        Rollout(str(tmp_path / "tied"), **ENGINE) as two,
    ):
        front = Front(tmp_path / "record", [one, two])
        try:
            front.fleet.wait_serving(2, WAIT)
            for given in (model, iter(list(model.state_dict().items()))):
                receipt = front.rollout.update_weights(given, transport="inline", timeout=WAIT)
                assert set(receipt.details["members_map"]) == set(front.names)
        finally:
            front.close()


GPU, OTHER = str(uuid4()), str(uuid4())
MAPPED = SharedAllocation(
    handle=pack_handle(GPU, 3 * FLAGS, "00" * 16, bytes(64)), secret="00" * 16, half=FLAGS, flags=5
)


def dealt(shared=MAPPED, **reaches):
    """Of members of two ranks each."""
    found = {name: frozenset(gpus) for name, gpus in reaches.items()}
    return CardMemory.of(shared, found, dict.fromkeys(found, 2))


def test_members_map_a_gpu_that_they_reach_each_with_flags_of_its_own():
    card = dealt(one=[GPU, OTHER], two=[OTHER], three=[GPU], four=[])
    assert {name: offer.get("first", 0) for name, offer in card.offers.items()} == {
        "one": 0, "three": 2,
    }  # fmt: skip
    assert card.mappers == Mappers(
        ranks=4, reaches=(GPU,),
        carries="sent the bytes, since they do not map this GPU: two, four",
    )  # fmt: skip
    everybody = dealt(one=[OTHER, GPU], two=[GPU, OTHER])
    assert everybody.mappers == Mappers(ranks=4, reaches=tuple(sorted((GPU, OTHER))))
    # One that has come since the trainer asked: it watches no flags of that one's ranks.
    late = dealt(one=[GPU], two=[GPU], three=[GPU])
    assert list(late.offers) == ["one", "two"]
    assert late.mappers.carries.endswith(": three")
    found = ways(dict.fromkeys(("one", "two"), ""), "here", {"one", "two"}, offered=False,
                 cards={"two"})  # fmt: skip
    assert {name: way.maps or way.feeder for name, way in found.items()} == {
        "one": "the front", "two": "the trainer's GPU",
    }  # fmt: skip


def test_a_gpus_memory_that_nobody_maps_is_refused_with_what_to_use():
    with pytest.raises(ConfigError, match=f"no member .* {GPU}: .* use transport='auto'"):
        dealt(one=[OTHER])
    with pytest.raises(ConfigError, match="the shared GPU memory is refused: it has 12288 bytes"):
        dealt(replace(MAPPED, half=2 * FLAGS), one=[GPU])
    request = UpdateRequest(
        update_id="u", transport="ipc", offer=to_plain(replace(MAPPED, flags=0)), bucket_bytes=1,
        timeout=WAIT,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"with one engine alone: .*, or use transport='auto'"):
        CardMemory.offered(request)
    assert CardMemory.offered(replace(request, offer=to_plain(MAPPED))) == MAPPED
    assert CardMemory.offered(replace(request, transport="inline")) is None


def test_a_member_that_could_not_map_a_gpu_is_not_asked_to_again_in_its_life():
    info = WeightInfo(
        epoch=1, version=0, label=None, state="idle", dtype=torch.float32, tensors=(), aliases={},
        tensor_parallel_size=1, transports=("ipc", "grpc_stream"), device="cuda:0", host=host_id(),
        devices=(OTHER,), reaches=(GPU, OTHER),
    )  # fmt: skip
    link = Link.to("127.0.0.1:1", None, "one", LEASE, None)
    try:
        link.announced(info)
        assert (link.reaches, link.devices) == ({GPU, OTHER}, (OTHER,))
        assert link.reaches_on(host_id()) == link.reaches
        assert not link.reaches_on("another")
        for other in ({"features": ("regions",)}, {"devices": ("",)}, {"host": ""}):
            link.announced(replace(info, **other))
            assert (link.reaches, link.devices) == (frozenset(), ())
        link.announced(info)
        link.maps_no_card()
        link.announced(info)
        assert not link.reaches
        link.announced(replace(info, epoch=info.epoch + 1))
        assert link.reaches
    finally:
        link.close()


def test_members_that_only_seem_to_share_the_memory_of_a_host_are_sent_the_bytes(
    engines, tmp_path, trained, monkeypatch
):
    """As on copies of one machine's snapshot, which have its boot id."""

    def absent(shared, who="", **_):
        raise shared_memory._refused(shared, "[Errno 2] No such file or directory", who)

    front = Front(tmp_path / "record", engines)
    monkeypatch.setattr(shared_memory, "_mapped", absent)
    try:
        front.fleet.wait_serving(3, WAIT)
        with pytest.raises(TransferFailed, match=r"is refused: .*the fleet's version 0 serves on"):
            front.rollout.update_weights(trained, transport="inline", **OPTIONS)
        receipt = front.rollout.update_weights(trained, **OPTIONS)
        assert receipt.transport == "inline"
        assert set(receipt.details["members"].values()) == {"committed"}
        assert set(told(receipt)) == set(front.names)
        assert all(one.check_weights(trained).equal for one in engines)
    finally:
        front.close()
