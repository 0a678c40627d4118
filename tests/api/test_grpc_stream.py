"""The transport through one port: a cut connection costs a bucket, a lost client a grace."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from proxies import Proxy

from rollout import Rollout
from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    TransferFailed,
    UpdateInProgress,
    VersionConflict,
)
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.chunks import document
from rollout.rpc.client import RolloutClient
from rollout.rpc.outbox import Outbox
from rollout.rpc.status import CHUNK
from rollout.server.grpc.updates import AHEAD, ANSWERS, HeldUpdates, UpdateStream
from rollout.weight_sync.protocol.messages import Begun, BucketHeader, Seal, UpdateRequest
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.trainer.shard_layout import PlanCache
from rollout.weight_sync.transports.host import SHARED_MEMORY
from rollout.weight_sync.transports.inline import GrpcStream
from rollout.weight_sync.transports.shared_memory import IpcSender

BUCKET = 48 << 10


@pytest.fixture
def nbytes(engine):
    return sum(meta.nbytes for meta in engine.weight_info().tensors)


def through(proxy):
    return Rollout.connect(proxy.address, timeout=10)


def test_the_stream_is_chosen_by_name_and_needs_no_second_port(
    engine, other_weights, changed, nbytes
):
    weights = changed(other_weights, 0.375)
    with Proxy(engine.address) as proxy, through(proxy) as client:
        receipt = client.update_weights(weights, transport="grpc_stream", bucket_bytes=BUCKET)
        assert client.check_weights(weights).equal
    assert (receipt.transport, receipt.wire_bytes >= nbytes) == ("grpc_stream", True)
    assert receipt.details["transport_reason"] == "asked for"
    assert "connections_replaced" not in receipt.details
    assert proxy.up >= nbytes


@pytest.mark.parametrize("part", [0.1, 0.5, 0.95])
def test_a_cut_costs_at_most_one_bucket_sent_twice(engine, other_weights, changed, nbytes, part):
    weights = changed(other_weights, part)
    with Proxy(engine.address) as whole, through(whole) as client:
        client.update_weights(changed(weights, 1.0), transport="grpc_stream", bucket_bytes=BUCKET)
    with Proxy(engine.address, (int(part * nbytes),)) as proxy, through(proxy) as client:
        receipt = client.update_weights(
            weights, transport="grpc_stream", bucket_bytes=BUCKET, timeout=10
        )
        assert client.check_weights(weights).equal
    assert proxy.cuts == 1
    assert receipt.details["connections_replaced"] == "1"
    assert int(receipt.details["resent_bytes"]) <= BUCKET
    assert int(receipt.details["resent_buckets"]) <= 1
    # What the sender says is what passed the wire: besides, one more set of HTTP/2 greetings.
    assert proxy.up <= whole.up + BUCKET + (16 << 10)


def test_every_cut_is_survived_until_the_last(engine, other_weights, changed, nbytes):
    weights = changed(other_weights, 0.1875)
    cuts = tuple(int(part * nbytes) for part in (0.2, 0.4, 0.6, 0.8))
    with Proxy(engine.address, cuts) as proxy, through(proxy) as client:
        receipt = client.update_weights(weights, transport="grpc_stream", bucket_bytes=BUCKET)
        assert client.check_weights(weights).equal
    assert proxy.cuts == 4
    assert receipt.details["connections_replaced"] == "4"
    assert int(receipt.details["resent_bytes"]) <= 4 * BUCKET
    assert int(receipt.details["resent_buckets"]) <= 4


def test_nobody_back_within_the_grace_is_an_error_on_both_sides(
    engine, other_weights, changed, nbytes, eventually
):
    live = engine.weight_version
    with Proxy(engine.address, (nbytes // 2,)) as proxy, through(proxy) as client:
        proxy.refuse_after_cut = True
        started = time.monotonic()
        with pytest.raises(TransferFailed, match=r"could not be made again within 0\.5 s"):
            client.update_weights(
                changed(other_weights, 0.5), transport=GrpcStream(0.5), bucket_bytes=BUCKET
            )
        assert time.monotonic() - started < 25
    eventually(lambda: engine.weight_info().state == "idle", 25.0)
    assert engine.weight_version == live
    assert engine.update_weights(other_weights).version == live + 1


def test_a_client_that_gives_up_holds_nothing(engine, other_weights):
    """Its goodbye is an abort, which is no cut: the grace is not waited for."""

    def failing():
        for index, item in enumerate(other_weights.items()):
            if index == 5:
                raise OSError("gone")
            yield item

    with Rollout.connect(engine.address, timeout=10) as client:
        for source in (failing(), iter([*other_weights.items()][:3])):
            with pytest.raises(Exception, match=r"gone|initialized"):
                client.update_weights(source, transport=GrpcStream(60), bucket_bytes=BUCKET)
            started = time.monotonic()
            client.update_weights(other_weights, transport=GrpcStream(60), bucket_bytes=BUCKET)
            assert time.monotonic() - started < 25


def request(**changes):
    values = {"update_id": os.urandom(8).hex(), "bucket_bytes": 1 << 20, "timeout": 5.0}
    return UpdateRequest(**{**values, "transport": "grpc_stream", **changes})


HOLDER = """
import sys, time
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.chunks import document
from rollout.rpc.client import RolloutClient
from rollout.weight_sync.protocol.messages import UpdateRequest
channel = RolloutClient(sys.argv[1]).open()
offer = {"grace": 1.5, "senders": 1}
begun = UpdateRequest(update_id="dying-slowly", bucket_bytes=1 << 20, timeout=30.0, offer=offer)
channel.begin(begun)
print("begun", flush=True)
time.sleep(60)
"""


def test_a_client_that_dies_holds_the_lease_for_its_grace_alone(engine, process, eventually):
    holder = process(
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, engine.address], stdout=subprocess.PIPE, text=True
        )
    )
    assert holder.stdout.readline() == "begun\n"
    died = time.monotonic()
    holder.send_signal(signal.SIGKILL)
    eventually(lambda: engine.weight_info().state == "idle", 25.0)
    assert 1.0 < time.monotonic() - died < 25


def test_a_stream_whose_last_answer_is_lost_gets_it_by_the_next_connection(engine, eventually):
    """Where a connection breaks with the last answer under way, the grace holds, too."""
    shared = request(offer={"grace": 20.0, "senders": 2}, timeout=20.0)
    with Proxy(engine.address) as proxy:
        client, other = RolloutClient(engine.address), RolloutClient(proxy.address)
        first = client.open()
        first.begin(shared)
        second = other.join(shared, first.secret, 1)
        proxy.hold(up=False)
        sealing = threading.Thread(
            target=lambda: sealed.append(second.seal(Seal(num_buckets=0, digests={})))
        )
        sealed = []
        sealing.start()
        time.sleep(0.5)  # until the answer is under way
        proxy.cut()
        proxy.go_on()
        sealing.join(20)
        assert sealed == [None]
        first.close()
        second.close()
        eventually(lambda: engine.weight_info().state == "idle", 20.0)
        client.close()
        other.close()


def test_what_a_busy_update_hears_of_its_end_later_does_not_keep_it():
    """The end of a connection's commands is read after the connection is known to be gone."""

    class Busy:
        def begin(self, request):
            return Begun(update_id=request.update_id, epoch=1, base_version=0, version=1)

        def wait(self, index, timeout):
            time.sleep(0.3)

        def abort(self, reason):
            ended.append(reason)

        def close(self):
            return None

    async def course():
        held, said = HeldUpdates(), asyncio.Queue()
        update = UpdateStream(Busy(), held)

        async def commands():
            while (command := await said.get()) is not None:
                yield command

        events = update.talk(commands())
        begin = request(offer={"grace": 0.5, "senders": 1})
        said.put_nowait(pb.UpdateCommand(begin=document(begin)))
        assert (await anext(events)).secret
        said.put_nowait(pb.UpdateCommand(wait=pb.Wait(index=0, timeout=1)))
        said.put_nowait(None)
        waits = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.05)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        await events.aclose()
        deadline = time.monotonic() + 20
        while held._updates and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return held._updates

    ended = []
    assert asyncio.run(course()) == {}
    assert "its connection broke, and no other came within 0.5 s" in ended[0]


def test_nothing_is_read_behind_a_begin_that_waits_or_kept_of_an_update_that_ended():
    class Waiting:
        def begin(self, request):
            assert turn.wait(20)
            return Begun(update_id=request.update_id, epoch=1, base_version=0, version=1)

        def wait(self, index, timeout):
            time.sleep(0.2)
            raise TransferFailed("a rank is gone")

        def close(self):
            return None

    turn, read = threading.Event(), []

    async def course():
        async def commands():
            yield pb.UpdateCommand(begin=document(request()))
            while True:
                read.append(len(read))
                yield pb.UpdateCommand(wait=pb.Wait(index=0, timeout=1))
                await asyncio.sleep(0)

        update = UpdateStream(Waiting(), HeldUpdates())
        events = update.talk(commands())
        begins = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.3)
        early = len(read)
        turn.set()
        assert (await begins).begun
        with pytest.raises(TransferFailed, match="a rank is gone"):
            await anext(events)
        while not update._finished:
            await asyncio.sleep(0.01)
        kept = [update._todo.get_nowait() for _ in range(update._todo.qsize())]
        await events.aclose()
        return early, [one for one in kept if isinstance(one, pb.UpdateCommand)]

    assert asyncio.run(asyncio.wait_for(course(), 30)) == (0, [])
    assert 0 < len(read) <= 2 * AHEAD


def test_answers_that_no_bucket_needs_end_the_update(engine):
    client = RolloutClient(engine.address)
    channel = client.open()
    channel.begin(request(offer={"grace": 1.0, "senders": 1}))
    for index in range(ANSWERS - 1):  # with that of its beginning
        channel.wait(index, 5.0)
    with pytest.raises(TransferFailed, match="and 0 buckets announced"):
        channel.wait(0, 5.0)
    client.close()


def test_a_lost_update_is_resumed_by_its_secret_alone(engine, eventually):
    client, other = RolloutClient(engine.address), RolloutClient(engine.address)
    channel = client.open()
    channel.begin(request(update_id="mine", offer={"grace": 30.0, "senders": 1}, timeout=60.0))
    thief = other.open()
    thief._request, thief._secret = (
        request(update_id="mine", offer={"grace": 30.0, "senders": 1}),
        "guessed",
    )
    calls = thief._update(thief._going_on(0))
    with pytest.raises(Exception, match="is not held here"):
        next(calls)
    assert engine.weight_info().state == "staging"
    channel.close()
    eventually(lambda: engine.weight_info().state == "idle", 20.0)  # of 30
    client.close()
    other.close()


def test_an_endless_grace_is_refused(engine, other_weights):
    with Rollout.connect(engine.address, timeout=10) as client:
        with pytest.raises(ConfigError, match="0 to 60 seconds"):
            client.update_weights(other_weights, transport=GrpcStream(61))
        channel = RolloutClient(engine.address).open()
        with pytest.raises(ConfigError, match="grace"):
            channel.begin(request(offer={"grace": 1e6, "senders": 1}))
    assert engine.weight_info().state == "idle"


def test_memory_is_shared_for_the_update_that_holds_the_lease_alone(engine, monkeypatch):
    """Neither for one that is refused, nor while it waits; what cannot be had leaves nothing."""
    made, create = [], IpcSender._create
    monkeypatch.setattr(IpcSender, "_create", lambda self: made.append(self) or create(self))
    shares = {"offer": {"grace": 1.0, "senders": 1, "shares": True}, "transport": "inline"}
    names = set(SHARED_MEMORY.glob("rollout-ipc-*"))
    client = RolloutClient(engine.address)
    with pytest.raises(ConfigError, match="bucket_bytes must be"):
        client.open().begin(request(bucket_bytes=1 << 62, **shares))
    holder = client.open()
    assert holder.begin(request(**shares)).shared
    with pytest.raises(UpdateInProgress):
        client.open().begin(request(timeout=0.2, **shares))
    assert len(made) == 1
    holder.close()
    client.close()
    with pytest.raises(TransferFailed, match="bytes of shared memory cannot be had"):
        IpcSender(None, 1 << 62, most=1 << 62)
    assert set(SHARED_MEMORY.glob("rollout-ipc-*")) <= names


def test_no_stream_leads_into_ones_own_process(engine, other_weights):
    with pytest.raises(ConfigError, match="use transport='auto'"):
        engine.update_weights(other_weights, transport="grpc_stream")


def numbers(outbox, count):
    messages = outbox.messages(outbox._turn)
    return [next(messages) for _ in range(count)]


def test_an_outbox_goes_on_behind_what_has_arrived():
    payload = torch.arange(5 * CHUNK // 2, dtype=torch.int64).to(torch.uint8).numpy().data
    outbox = Outbox(keep=True, window=4 * CHUNK)
    announced = object()
    outbox.put("begin")
    outbox.put_bucket(announced, payload)
    assert outbox.put("wait") == 6
    first = numbers(outbox, 4)
    assert first[:2] == ["begin", announced]
    outbox.suspend()
    outbox.go_on(3)  # one chunk has arrived, one got lost
    again = numbers(outbox, 2)
    assert again[0] == first[3]
    assert b"".join(m.chunk for m in (first[2], *again[:2])) == payload.tobytes()
    assert (outbox.resent_bytes, outbox.resent_buckets) == (CHUNK, 0)


def test_an_outbox_sends_no_second_bucket_ahead_of_the_first():
    outbox = Outbox(keep=True, window=CHUNK)
    for name in ("a", "b"):
        outbox.put_bucket(name, memoryview(bytes(10)))
    assert len(numbers(outbox, 2)) == 2
    assert not outbox._ready()
    outbox.received(1)
    assert outbox._ready()
    assert numbers(outbox, 1) == ["b"]


def test_a_stuck_bucket_ends_at_the_deadline_of_its_wait(engine, eventually):
    """The server is reached and says nothing: no connection breaks, the wait does."""
    with Proxy(engine.address) as proxy:
        client = RolloutClient(proxy.address)
        channel = client.open()
        channel.begin(request(offer={"grace": 1.0, "senders": 1}))
        proxy.silent = True
        channel.bucket(BucketHeader(0, (), 4), torch.zeros(4, dtype=torch.uint8))
        with pytest.raises(TimeoutError):
            channel.wait(0, 0.5)
        client.close()
    eventually(lambda: engine.weight_info().state == "idle")


class Far:
    """A service as a trainer on another host, behind NAT, sees it: nothing reaches the trainer."""

    local_address = "203.0.113.7"  # of no interface here

    def __init__(self, client):
        self._client, self.open, self.receipts = client, client.open, client.receipts

    def info(self):
        return replace(self._client.info(), host="elsewhere")


def test_auto_takes_the_stream_where_no_group_can_form(engine, other_weights):
    client = RolloutClient(engine.address)
    receipt = publish(
        other_weights, connect=lambda: Far(client), options=UpdateOptions(timeout=5.0)
    )
    assert receipt.transport == "grpc_stream"
    assert receipt.details["transport_reason"].startswith("no ipc: the engine is on another host")
    client.close()


class Walled(Far):
    """As ``Far``, behind a firewall that drops what the engine's ranks send."""

    local_address = "127.0.0.1"

    def __init__(self, client, silent):
        super().__init__(client)
        self._port = silent.getsockname()[1]
        self.open = self._open

    def _open(self):
        channel = self._client.open()
        begin = channel.begin

        def elsewhere(request):
            if request.transport == "broadcast":
                where = {**request.offer["rendezvous"], "port": self._port}
                request = replace(request, offer={"rendezvous": where})
            return begin(request)

        channel.begin = elsewhere
        return channel


def test_auto_waits_once_for_a_group_that_a_firewall_keeps_apart(engine, other_weights, caplog):
    client, plans, took = RolloutClient(engine.address), PlanCache(), []
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # the queue is full, and who comes now gets no answer
            guest = stack.enter_context(socket.socket())
            guest.setblocking(False)
            guest.connect_ex(silent.getsockname())
        for _ in range(2):
            started = time.monotonic()
            receipt = publish(
                other_weights, connect=lambda: Walled(client, silent), plans=plans,
                options=UpdateOptions(timeout=4.0),
            )  # fmt: skip
            took.append(time.monotonic() - started)
            assert receipt.transport == "grpc_stream"
    assert took[1] < 4 <= took[0]
    assert receipt.details["transport_reason"].endswith("; no broadcast: not there lately")
    told = [record.getMessage() for record in caplog.records if "did not connect" in record.msg]
    assert len(told) == 1
    assert "for 600 s not by broadcast" in told[0]
    assert "transport='grpc_stream' needs the engine's port alone" in told[0]
    client.close()


class Slow(Far):
    """A service whose first begin is not answered in time, as where a long step is under way."""

    local_address = "127.0.0.1"
    begun = 0

    def __init__(self, client):
        super().__init__(client)
        self.open = self._open

    def _open(self):
        channel = self._client.open()
        begin = channel.begin

        def late(request):
            Slow.begun += 1
            if Slow.begun == 1:
                raise DeadlineExceeded("no answer within 4 s (phase: begun)")
            return begin(request)

        channel.begin = late
        return channel


def test_auto_passes_over_no_way_because_the_engine_was_slow_once(engine, other_weights, caplog):
    client, plans = RolloutClient(engine.address), PlanCache()
    Slow.begun = 0
    found = [
        publish(
            other_weights, connect=lambda: Slow(client), plans=plans,
            options=UpdateOptions(timeout=20.0),
        ).transport
        for _ in range(2)
    ]  # fmt: skip
    assert found == ["grpc_stream", "broadcast"]
    assert not [record for record in caplog.records if "did not connect" in record.msg]
    client.close()


def test_a_delta_for_another_base_is_refused_on_both_sides(engine, client, other_weights):
    live = engine.weight_version
    weights = RolloutClient(engine.address)
    channel = weights.open()
    base = (engine.weight_info().epoch, live + 3)
    with pytest.raises(VersionConflict, match=r"built on \(epoch, version\)"):
        channel.begin(request(encoding="delta", base=base, offer={"grace": 5.0, "senders": 1}))
    assert (engine.weight_version, engine.weight_info().state) == (live, "idle")
    # A sender that meets this goes full by itself: another one committed meanwhile.
    kinds = [
        client.update_weights(other_weights, transport="grpc_stream", encoding="delta"),
        engine.update_weights(other_weights),
        client.update_weights(other_weights, transport="grpc_stream", encoding="delta"),
        client.update_weights(other_weights, transport="grpc_stream", encoding="delta"),
    ]
    assert [kind.details["encoding"] for kind in kinds] == ["full", "full", "full", "delta"]
    weights.close()
