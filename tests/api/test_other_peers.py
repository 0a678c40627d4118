"""Peers of another protocol, another model or another size: a named error, soon, on both sides."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent import futures
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version

import grpc
import pytest
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.distributed import Rendezvous
from rollout.errors import ConfigError, EngineClosed, TransferFailed, WeightMismatch
from rollout.rpc import rollout_pb2
from rollout.rpc.client import RolloutClient
from rollout.rpc.services import (
    ControlStub,
    GenerationStub,
    WeightSyncStub,
    add_service,
)
from rollout.rpc.status import error_from_rpc
from rollout.weight_sync.protocol.messages import Seal, UpdateRequest, WeightInfo
from rollout.wire.codec import from_json, from_plain, to_json, to_plain
from rollout.wire.version import FEATURES, PROTOCOL, PROTOCOL_KEY, SOFTWARE_KEY

OTHER = PROTOCOL + 1


@contextmanager
def server_that_speaks(protocol: int, **more):
    class Control:
        def ServerInfo(self, request, context):
            return rollout_pb2.ServerInfoResponse(model="m", protocol=protocol, **more)

    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_service(server, "Control", Control())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_a_client_asks_a_service_what_it_is_once_for_each_connection():
    asked = []

    class Control:
        def ServerInfo(self, request, context):
            asked.append(request)
            return rollout_pb2.ServerInfoResponse(model="m", protocol=PROTOCOL)

    def served(port=0):
        server = grpc.server(futures.ThreadPoolExecutor(1))
        add_service(server, "Control", Control())
        return server, server.add_insecure_port(f"127.0.0.1:{port}")

    async def call():
        server, port = served()
        server.start()
        client = RolloutClient(f"127.0.0.1:{port}")
        try:
            for _ in range(4):
                await client.start()
            assert len(asked) == 1
            await asyncio.to_thread(server.stop(None).wait)
            server, _ = served(port)  # another one in its place
            server.start()
            async with asyncio.timeout(25):
                while len(asked) == 1:  # until the broken connection is noticed
                    with suppress(EngineClosed):
                        await client.start()
                    await asyncio.sleep(0.01)
            await client.start()
            assert len(asked) == 2
        finally:
            await client.disconnect()
            server.stop(None).wait()

    asyncio.run(call())


@contextmanager
def soon(limit: float = 25.0):
    """Long before the deadlines of 60 s that the calls here have."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < limit


@pytest.mark.parametrize("theirs", [OTHER, 0], ids=["newer", "from before it had numbers"])
def test_a_client_names_a_service_of_another_protocol(theirs):
    with (
        server_that_speaks(theirs) as address,
        soon(),
        pytest.raises(ConfigError, match=f"version {theirs} .* version {PROTOCOL}"),
    ):
        Rollout.connect(address, timeout=60)


def test_a_client_takes_a_newer_service_that_still_speaks_its_version():
    newer = {"oldest_protocol": PROTOCOL, "software": "rollout 9.0.0, torch 3.0.0"}
    with server_that_speaks(PROTOCOL + 4, **newer) as address:
        Rollout.connect(address, timeout=60).shutdown()


def test_without_a_version_in_common_both_sides_software_is_named():
    theirs = {"oldest_protocol": OTHER, "software": "rollout 9.0.0, torch 3.0.0"}
    with (
        server_that_speaks(OTHER + 1, **theirs) as address,
        pytest.raises(ConfigError) as caught,
    ):
        Rollout.connect(address, timeout=60)
    said = str(caught.value)
    assert f"versions {OTHER} to {OTHER + 1} of the protocol (rollout 9.0.0, torch 3.0.0)" in said
    ours = f"rollout {version('rollout')}, torch {version('torch')}"
    assert f"this side version {PROTOCOL} of the protocol ({ours})" in said


@pytest.mark.parametrize("oldest", [PROTOCOL - 2, PROTOCOL])
def test_a_trainer_of_another_rollout_and_torch_updates_and_samples(engine, other_weights, oldest):
    """It says so in its metadata alone: tensors, dtypes and documents are the protocol's."""
    with Rollout.connect(engine.address, timeout=10) as client:
        backend = client._async.backend
        says = {PROTOCOL_KEY: f"{oldest}-{PROTOCOL + 3}", SOFTWARE_KEY: "torch 2.11.0+cu128"}
        backend._metadata = tuple(says.items())
        receipt = client.update_weights(dict(other_weights))
        assert client.weight_info().version == receipt.version
        assert client.check_weights(dict(other_weights)).equal
        (output,) = client.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0))
        assert output.outputs[0].weight_versions[-1].version == receipt.version


def test_dtypes_travel_by_name_and_one_that_is_unknown_here_is_named(engine):
    plain = to_plain(engine.weight_info())
    assert plain["dtype"] == "float32"
    with pytest.raises(TransferFailed, match=r"unknown dtype 'float4_e2m1'.*with torch \d"):
        from_plain(WeightInfo, {**plain, "dtype": "float4_e2m1"})


def test_what_a_noun_got_later_does_not_travel_until_it_is_used(engine):
    info, seal = to_plain(engine.weight_info()), to_plain(Seal(num_buckets=1, digests={}))
    assert not {"prepared", "fence", "components"} & info.keys()
    assert "fence" not in seal
    assert from_plain(WeightInfo, info).components == ("policy",)
    assert from_plain(Seal, seal).fence is None
    used = Seal(num_buckets=1, digests={}, fence=3)
    assert from_json(Seal, to_json(used)) == used
    with pytest.raises(TransferFailed, match="unknown fields: 'later'"):
        from_plain(Seal, {**seal, "later": 1})


def test_features_are_words():
    """A name in brackets, without a comma, would be a feature for each of its letters."""
    assert all(len(feature) > 1 for feature in FEATURES)
    assert len(set(FEATURES)) == len(FEATURES)


def test_a_trainer_is_told_of_the_gpus_that_ranks_reach_if_it_knows_the_word(engine, monkeypatch):
    coordinator = engine._async.backend._coordinator
    info = replace(coordinator.info(), reaches=("a GPU",))
    monkeypatch.setattr(coordinator, "info", lambda: info)
    with grpc.insecure_channel(engine.address) as channel:
        for features, told in (((), False), (("cards", "of later"), True)):
            request = rollout_pb2.WeightInfoRequest(features=features)
            answer = WeightSyncStub(channel).Info(request, timeout=60)
            assert ("reaches" in json.loads(answer.json)) == told
    with closing(RolloutClient(engine.address)) as client:
        assert client.info().reaches == ("a GPU",)


@pytest.mark.parametrize("verb", ["ServerInfo", "Generate", "Info", "Update"])
def test_a_service_names_a_client_of_another_protocol(engine, caplog, verb):
    calls = {
        "ServerInfo": (ControlStub, rollout_pb2.ServerInfoRequest()),
        "Info": (WeightSyncStub, rollout_pb2.WeightInfoRequest()),
        "Generate": (GenerationStub, rollout_pb2.GenerateRequest()),
        "Update": (WeightSyncStub, iter(())),
    }
    stub, message = calls[verb]
    with grpc.insecure_channel(engine.address) as channel:
        call = getattr(stub(channel), verb)
        metadata = ((PROTOCOL_KEY, str(OTHER)),)
        with soon(), pytest.raises(grpc.RpcError) as caught:
            list(call(message, timeout=60, metadata=metadata))
    error = error_from_rpc(caught.value, engine.address)
    assert isinstance(error, ConfigError)
    assert f"version {OTHER}" in str(error)
    assert any(verb in record.getMessage() for record in caplog.records)


def request(**fields) -> UpdateRequest:
    return UpdateRequest(**{"update_id": "u", "bucket_bytes": 1 << 20, "timeout": 60.0, **fields})


def test_an_update_of_another_protocol_is_refused_before_the_lease(engine):
    for theirs, said in (
        ({"protocol": OTHER}, f"this side version {PROTOCOL}"),
        ({}, "protocol"),
    ):
        wire = to_plain(request())
        del wire["protocol"]
        begin = rollout_pb2.WeightDocument(json=json.dumps({**wire, **theirs}).encode())
        commands = [rollout_pb2.UpdateCommand(begin=begin)]
        with (
            grpc.insecure_channel(engine.address) as channel,
            soon(),
            pytest.raises(grpc.RpcError) as caught,
        ):
            list(WeightSyncStub(channel).Update(iter(commands), timeout=60))
        error = error_from_rpc(caught.value, engine.address)
        assert isinstance(error, ConfigError if theirs else TransferFailed)
        assert said in str(error)
        assert engine.weight_info().state == "idle"


def test_a_trainer_of_another_model_is_told_which_tensors_differ(engine, client, tmp_path):
    other = write_tiny(tmp_path, num_layers=3, intermediate_size=96)
    before = engine.weight_info()
    with soon(), pytest.raises(WeightMismatch) as caught:
        client.update_weights(other, timeout=60)
    assert "mlp.gate_proj.weight has shape" in str(caught.value)
    assert engine.weight_info() == before


@pytest.mark.parametrize("size", [1, 4])
def test_a_group_of_another_size_is_refused_before_anyone_waits_in_it(engine, client, size):
    where = Rendezvous("127.0.0.1", 1, "secret", size, "tcp")
    channel = client._async.backend.open()
    with soon(), pytest.raises(ConfigError, match=f"has {size} places"):
        channel.begin(request(transport="broadcast", offer={"rendezvous": to_plain(where)}))
    channel.close()
    assert engine.weight_info().state == "idle"
