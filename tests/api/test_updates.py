"""Updates over gRPC: proof of the weights, typed errors, leases, restarts."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
import pytest
import torch
from api.conftest import ENGINE

from rollout import Rollout, SamplingParams
from rollout.errors import (
    ConfigError,
    EngineClosed,
    EngineRestarted,
    InvalidRequest,
    TransferFailed,
    UpdateInProgress,
    VersionConflict,
    WeightMismatch,
)
from rollout.rpc import rollout_pb2
from rollout.rpc.client import RolloutClient
from rollout.rpc.services import WeightSyncStub
from rollout.rpc.status import error_from_rpc
from rollout.weight_sync.protocol.messages import BucketHeader, Message, Seal, UpdateRequest
from rollout.wire.codec import to_json, to_plain

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("transport", ["inline", "broadcast"])
def test_an_update_over_grpc_is_live_and_proven(client, engine, other_weights, changed, transport):
    weights = changed(other_weights, {"inline": 0.125, "broadcast": 0.25}[transport])
    before = client.weight_version
    receipt = client.update_weights(weights, transport=transport, bucket_bytes=40_000, timeout=10)
    assert receipt.transport == transport
    assert receipt.version == before + 1 == client.weight_version == engine.weight_version
    assert client.check_weights(weights).equal
    assert not client.check_weights(other_weights).equal
    [out] = client.generate([1, 2, 3], GREEDY)
    assert out.epoch == receipt.epoch
    assert [span.version for span in out.outputs[0].weight_versions] == [receipt.version]


def test_seconds_may_be_numpys(client, engine, other_weights):
    seconds = np.float64(30)  # a float, of a class of its own
    for rollout in (client, engine):
        receipt = rollout.update_weights(
            other_weights, timeout=seconds, max_stall=seconds, in_flight="pin", pin_timeout=seconds
        )
        assert rollout.weight_version == receipt.version


def test_rollback_and_preflight_over_grpc(client, other_weights, changed):
    first, second = changed(other_weights, 0.5), changed(other_weights, 0.75)
    client.update_weights(first, timeout=10)
    version = client.update_weights(second, timeout=10).version
    assert client.rollback().version == version + 1
    assert client.check_weights(first).equal
    assert client.preflight(first).equal
    wrong = {**first, "model.norm.weigth": first["model.norm.weight"]}
    del wrong["model.norm.weight"]
    assert "model.norm.weight" in " ".join(client.preflight(wrong).problems)


def test_update_errors_arrive_as_their_own_class_and_change_nothing(client, other_weights):
    live, before = client.weight_version, client.generate([1, 2, 3], GREEDY)
    bad = {**other_weights, "model.norm.weight": torch.zeros(3)}
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight"):
        client.update_weights(bad, timeout=5)
    with pytest.raises(VersionConflict, match="not above"):
        client.update_weights(other_weights, version=live, timeout=5)
    assert client.weight_version == live
    assert client.generate([1, 2, 3], GREEDY)[0].outputs == before[0].outputs


@pytest.mark.parametrize("wrong", [["ipc"], np.array([1, 2]), torch.zeros(2), 0, ""])
@pytest.mark.parametrize(
    "name", ["transport", "encoding", "staging", "in_flight", "pin_fallback", "adapters"]
)
def test_a_keyword_of_another_type_is_named(engine, other_weights, name, wrong):
    live = engine.weight_version
    with pytest.raises(ConfigError, match=name):
        engine.update_weights(other_weights, **{name: wrong})
    assert engine.weight_version == live


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 10**30},
        {"max_extra_memory": 10**30},
        {"label": "x" * 10**5},
        {"label": "\ud800"},
        {"update_id": 5},
    ],
)
def test_what_no_message_can_say_is_named_before_anything_is_sent(client, other_weights, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        client.update_weights(other_weights, **wrong)


def test_a_text_that_cannot_be_sent_is_an_invalid_request(client, engine):
    half = "\ud800"
    for face in (client, engine):
        for verb in (
            lambda face=face: face.generate([1], request_ids=half),
            lambda face=face: face.abort(half),
            lambda face=face: face.wake_up(half),
            lambda face=face: face.tokenize(half),
        ):
            with pytest.raises(InvalidRequest):
                verb()


@pytest.mark.parametrize("wrong", ["", " ", None, 5, b"/tmp", "a\0b", "\ud800"])
def test_what_is_no_path_is_not_taken_for_one(engine, tmp_path, monkeypatch, wrong):
    monkeypatch.chdir(tmp_path)
    live = engine.weight_version
    verbs = [
        lambda: engine.save_sharded_state(wrong),
        lambda: engine.load_lora_adapter("a", wrong),
        lambda: engine.check_weights(wrong),
        lambda: engine.preflight(wrong),
        lambda: engine.update_weights(wrong),
        lambda: engine.update_weights(adapters={"a": wrong}),
        lambda: engine.update_weights(server_path=wrong),
    ]
    for verb in verbs:
        with pytest.raises(ConfigError):
            verb()
    assert engine.weight_version == live
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["false", None, 1, np.array([1, 2])])
def test_what_is_neither_true_nor_false_does_not_count_as_true(engine, tmp_path, wrong):
    for verb, name in (
        (engine.reset_prefix_cache, "reset_running_requests"),
        (lambda normalize: engine.embed([1, 2], normalize=normalize), "normalize"),
        (lambda inplace: engine.load_lora_adapter("a", tmp_path, inplace=inplace), "inplace"),
    ):
        with pytest.raises(InvalidRequest, match=f"{name} must be True or False"):
            verb(wrong)


def test_flags_of_numpy_are_flags(engine, client):
    for face in (engine, client):
        face.reset_prefix_cache(np.True_)
        plain, scaled = (
            np.linalg.norm(face.embed([1, 2], normalize=flag)[0].embedding)
            for flag in np.array([False, True])
        )
        assert scaled == pytest.approx(1, abs=1e-3)
        assert plain != pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("wrong", [None, 5, ["a"], ""])
def test_what_is_unloaded_has_a_name(engine, wrong):
    with pytest.raises(InvalidRequest, match="the name of an adapter must be a text"):
        engine.unload_lora_adapter(wrong)


def request(**changes):
    values = {"update_id": os.urandom(8).hex(), "bucket_bytes": 1 << 20, "timeout": 10.0}
    return UpdateRequest(**{**values, **changes})


def test_who_has_an_engine_alone_gets_the_error_and_no_warning_beside_it(bare_checkpoint, caplog):
    with Rollout(bare_checkpoint, **ENGINE) as alone:
        for told in (False, True):
            with pytest.raises(WeightMismatch, match=r"no\.such"):
                alone.update_weights({"no.such": torch.zeros(1)})
            warned = [r for r in caplog.records if "serves on" in r.getMessage()]
            assert bool(warned) is told
            alone.serve()  # others may be connected from here on


def test_a_second_update_waits_and_is_refused_until_the_first_lease_ends(engine):
    one, two = RolloutClient(engine.address), RolloutClient(engine.address)
    first, second, third = one.open(), two.open(), two.open()
    first.begin(request())
    with pytest.raises(UpdateInProgress):
        second.begin(request(timeout=0.4))
    first.close()
    assert third.begin(request()).base_version == engine.weight_version
    third.abort("enough")
    for part in (first, second, third, one, two):
        part.close()
    assert engine.weight_info().state == "idle"


def test_an_abort_from_another_thread_ends_a_waiting_call(engine):
    client = RolloutClient(engine.address)
    channel = client.open()
    channel.begin(request(transport="inline", timeout=60))
    caught = []

    def wait():
        try:
            channel.seal(Seal(num_buckets=3, digests={}))
            channel.commit()
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    channel.abort("the watchdog says so")
    thread.start()
    thread.join(30)  # of 60
    assert not thread.is_alive()
    assert isinstance(caught[0], TransferFailed)
    assert "watchdog" in str(caught[0])
    client.close()


HOLDER = """
import sys, time
from rollout.rpc.client import RolloutClient
from rollout.weight_sync.protocol.messages import UpdateRequest
client = RolloutClient(sys.argv[1])
channel = client.open()
channel.begin(UpdateRequest(update_id="dying", bucket_bytes=1 << 20, timeout=30.0))
print("begun", flush=True)
time.sleep(60)
"""


def test_a_client_that_dies_mid_update_gives_up_its_lease_at_once(engine, process, eventually):
    holder = process(
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, engine.address], stdout=subprocess.PIPE, text=True
        )
    )
    assert holder.stdout.readline() == "begun\n"
    assert engine.weight_info().state == "staging"
    before = engine.generate([1, 2, 3], GREEDY)[0].outputs
    holder.send_signal(signal.SIGKILL)
    eventually(lambda: engine.weight_info().state == "idle", 20.0)  # of 30
    assert engine.generate([1, 2, 3], GREEDY)[0].outputs == before


def _command(**kind):
    return rollout_pb2.UpdateCommand(**kind)


def _begin():
    wire = to_json(request(timeout=60))
    return _command(begin=rollout_pb2.WeightDocument(json=wire))


def _bucket(nbytes, announced):
    return _announced(BucketHeader(0, (), nbytes), announced)


def _announced(header, nbytes):
    head = json.dumps(to_plain(header)).encode()
    return _command(bucket=rollout_pb2.Bucket(header_json=head, payload_bytes=nbytes))


NO_BYTES = Message(0, 0, 0, 0, ())  # of a round, whose bytes go beside the channel


@pytest.mark.parametrize(
    ("commands", "names"),
    [
        ([_command(begin=rollout_pb2.WeightDocument(json=b"{"))], "malformed"),
        ([_command(begin=rollout_pb2.WeightDocument(json=b"{}"))], "update_id"),
        ([_begin(), _command(chunk=b"abc")], "without a bucket"),
        ([_begin(), _bucket(4, 5)], "announces"),
        ([_begin(), _bucket(4, 4), _command(chunk=b"12345")], "longer"),
        ([_begin(), _bucket(4, 4), _command(commit=rollout_pb2.Commit())], "ended early"),
        ([_begin(), _bucket(1 << 50, 1 << 50)], "over the agreed"),
        ([_begin(), _bucket((1 << 20) + 1, (1 << 20) + 1)], "over the agreed 1048576"),
        ([_begin(), _announced(BucketHeader(0, (), 1 << 39, (NO_BYTES,)), 1 << 39)], "messages"),
        ([_command()], "without a kind"),
    ],
)
def test_a_malformed_stream_is_refused_and_frees_the_lease(engine, eventually, commands, names):
    with grpc.insecure_channel(engine.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(WeightSyncStub(channel).Update(iter(commands), timeout=30))
        error = error_from_rpc(caught.value, engine.address)
    assert isinstance(error, TransferFailed)
    assert names in str(error)
    eventually(lambda: engine.weight_info().state == "idle", 30)  # of 60


GROUP = {"host": "127.0.0.1", "port": 9, "secret": "s", "size": 2, "backend": "tcp"}
MEMORY = {"name": f"rollout-ipc-1-{'0' * 32}", "secret": "0" * 32, "half": 4096}
NORM = {"name": "model.norm.weight", "dtype": "float32", "shape": [64]}
BAD = [
    {"update_id": ""},
    {"update_id": "u" * 300},
    {"label": "l" * 5000},
    {"protocol": 0},
    {"version": -1},
    {"version": 0},
    {"version": (1 << 52) + 1},
    {"version": (1 << 53) + 1},
    {"version": "7"},
    {"base": [1, 2, 3]},
    {"base": [7, 7]},
    {"encoding": "gzip"},
    {"encoding": "delta"},
    {"metadata": [NORM, NORM]},
    {"metadata": [{**NORM, "name": "model.norm.weigth"}]},
    {"metadata": [{**NORM, "dtype": "float31"}]},
    {"metadata": [{**NORM, "dtype": "int64"}]},
    {"metadata": [{**NORM, "shape": [-64]}]},
    {"metadata": []},
    {"partial": 1},
    {"transport": "pigeon"},
    {"transport": "foreign"},
    {"transport": "broadcast"},
    {"transport": "p2p"},
    {"transport": "ipc"},
    {"transport": "broadcast", "offer": {"rendezvous": {**GROUP, "size": 9}}},
    {"transport": "broadcast", "offer": {"rendezvous": {**GROUP, "backend": "nccl"}}},
    {"transport": "broadcast", "offer": {"rendezvous": {**GROUP, "backend": "mpi"}}},
    {"transport": "broadcast", "offer": {"rendezvous": {**GROUP, "port": 0}}},
    {"transport": "ipc", "offer": {**MEMORY, "name": "../../etc/passwd"}},
    {"transport": "ipc", "offer": {**MEMORY, "half": 8192}},
    {"transport": "ipc", "offer": {**MEMORY, "handle": "AAAA"}},
    {"bucket_bytes": 0},
    {"bucket_bytes": 63},
    {"bucket_bytes": 1 << 40},
    {"bucket_bytes": 1.5},
    {"staging": "disk"},
    {"in_flight": "bogus"},
    {"label": 7},
    {"timeout": 0},
    {"timeout": -1},
    {"timeout": float("inf")},
    {"timeout": float("nan")},
    {"timeout": 1e11},
    {"offer": 7},
    {"offer": {"pigeons": 1}},
    {"offer": {"grace": 1, "senders": 0}},
    {"offer": {"grace": 1, "senders": 1 << 20}},
    {"offer": {"grace": 61, "senders": 1}},
    {"offer": {"grace": float("nan"), "senders": 1}},
    {"offer": {"grace": "x" * (1 << 17)}},
    {"transport": "p2p", "offer": {"rendezvous": GROUP, "senders": 1}},
]


def test_a_begin_with_any_bad_field_is_refused_before_anything_is_staged(
    engine, client, other_weights, changed
):
    client.update_weights(changed(other_weights, 1.0), timeout=10)
    live, version = changed(other_weights, 1.5), client.weight_version + 1
    client.update_weights(live, timeout=10)
    link = RolloutClient(engine.address)
    good = to_plain(request(transport="inline", bucket_bytes=4096, timeout=5))
    with grpc.insecure_channel(engine.address) as channel:
        for wrong in BAD:
            wire = json.dumps({**good, **wrong}).encode()
            begin = _command(begin=rollout_pb2.WeightDocument(json=wire))
            with pytest.raises(grpc.RpcError) as caught:
                list(WeightSyncStub(channel).Update(iter([begin]), timeout=10))
            error = error_from_rpc(caught.value, engine.address)
            assert isinstance(
                error, (ConfigError, TransferFailed, VersionConflict, WeightMismatch)
            ), (wrong, error)
            info = link.info()
            assert (info.version, info.state) == (version, "idle"), wrong
    assert client.check_weights(live).equal
    assert client.rollback().version == version + 1  # the shadow still holds the version before
    assert client.check_weights(changed(other_weights, 1.0)).equal
    link.close()


def test_a_restarted_engine_is_not_sampled_from_until_a_full_update(checkpoint, other_weights):
    settings = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 32}
    # The second is there before the first goes: nobody else takes the port meanwhile.
    with Rollout(checkpoint, **settings) as second:
        with Rollout(checkpoint, **settings) as first:
            address = first.address
            client = Rollout.connect(address, timeout=10)
            seen = client.update_weights(other_weights, timeout=10)
            assert client.generate([1, 2], GREEDY)[0].epoch == seen.epoch
        with client:
            assert second.serve(port=int(address.rsplit(":")[-1])) == address
            with pytest.raises(EngineRestarted, match="full update"):
                client.generate([1, 2], GREEDY)
            part = [("model.norm.weight", other_weights["model.norm.weight"])]
            with pytest.raises(EngineRestarted, match="full update"):
                client.update_weights(part, partial=True, timeout=5)
            assert second.weight_version == 0
            receipt = client.update_weights(other_weights, timeout=10)
            assert receipt.epoch != seen.epoch
            assert client.generate([1, 2], GREEDY)[0].epoch == receipt.epoch


def test_a_service_that_ends_mid_update_fails_the_transfer(bare_checkpoint):
    with Rollout(bare_checkpoint, device="cpu", num_threads=1, num_kv_blocks=32) as rollout:
        client = RolloutClient(rollout.address)
        channel = client.open()
        channel.begin(request())
    started = time.monotonic()
    with pytest.raises(EngineClosed, match="shut down during the update"):
        channel.wait(0, 60.0)
    assert time.monotonic() - started < 30
    with pytest.raises((EngineClosed, TransferFailed)):
        channel.bucket(BucketHeader(0, (), 0), None)
    client.close()
