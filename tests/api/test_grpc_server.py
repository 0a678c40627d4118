"""The server's doors: ports, tokens, health, reflection, and clients that find nobody."""

import asyncio
import logging
import socket
import threading
import time
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from rollout import Rollout, SamplingParams
from rollout.distributed import is_loopback
from rollout.errors import ConfigError, EngineClosed
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.client import RolloutClient
from rollout.rpc.rollout_pb2 import GenerateRequest
from rollout.rpc.services import ControlStub, GenerationStub, WeightSyncStub
from rollout.rpc.status import CHANNEL_OPTIONS, MAX_BODY, SERVER_OPTIONS
from rollout.server.auth import ABORT_ALL, ROUTES, Tokens
from rollout.server.grpc.interceptors import refusing
from rollout.weight_sync.protocol.messages import UpdateRequest, WeightInfo
from rollout.wire.codec import from_json, to_json

ONE = SamplingParams(max_tokens=1)
SETTINGS = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 32}


@pytest.fixture(scope="module")
def guarded(bare_checkpoint):
    with Rollout(bare_checkpoint, **SETTINGS) as rollout:
        rollout.serve(token="sampler", control_token="trainer")
        yield rollout


def test_health_and_reflection_are_standard(engine):
    with grpc.insecure_channel(engine.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "rollout.v1.Generation", "rollout.v1.WeightSync"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"rollout.v1.Generation", "rollout.v1.Control", "grpc.health.v1.Health"} <= set(services)


def test_a_client_reads_what_the_engine_says_of_its_tensors_once(engine):
    client = RolloutClient(engine.address)
    first, again = client.info(), client.info()
    assert first.tensors
    assert first.tensors is again.tensors
    with grpc.insecure_channel(engine.address) as channel:
        stub = WeightSyncStub(channel)
        assert stub.Info is stub.Info  # made once
        assert from_json(WeightInfo, stub.Info(pb.WeightInfoRequest()).json) == again
        with pytest.raises(AttributeError, match="WeightSync has no method 'Nothing'"):
            stub.Nothing  # noqa: B018
    client.close()


def test_a_foreign_client_gets_a_status_for_an_empty_prompt_message(engine):
    with grpc.insecure_channel(engine.address) as channel:
        call = GenerationStub(channel).Generate(GenerateRequest(prompts=[{}]), timeout=5)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_parameters_that_are_too_many_are_counted_and_not_read(engine):
    unread = [pb.SamplingParams(json=b"{")] * 3
    with grpc.insecure_channel(engine.address) as channel:
        call = GenerationStub(channel).Generate(
            GenerateRequest(prompts=[{"text": "a"}], params=unread), timeout=5
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("3 sampling parameters for 1 prompts")


def test_a_foreign_client_may_leave_ids_and_parameters_out(engine):
    with grpc.insecure_channel(engine.address) as channel:
        prompts = [{"token_ids": {"ids": [1]}}, {"token_ids": {"ids": [2]}}]
        replies = list(GenerationStub(channel).Generate(GenerateRequest(prompts=prompts)))
    assert sorted(reply.index for reply in replies) == [0, 1]
    assert all(reply.output.finished for reply in replies)


def test_tokens_part_sampling_from_weights(guarded, other_weights):
    with pytest.raises(ConfigError, match="token"):
        Rollout.connect(guarded.address, timeout=5)
    with pytest.raises(ConfigError, match="token"):
        Rollout.connect(guarded.address, token="wrong", timeout=5)
    with Rollout.connect(guarded.address, token="sampler", timeout=5) as sampler:
        assert sampler.generate([1], ONE)[0].finished
        assert sampler.weight_info().version == 0
        assert sampler.metrics().state == "running"
        for verb in (sampler.pause_generation, sampler.reset_prefix_cache, sampler.rollback):
            with pytest.raises(ConfigError, match="token"):
                verb()
        with pytest.raises(ConfigError, match="token"):
            sampler.update_weights(dict(other_weights), timeout=5)
    with Rollout.connect(guarded.address, token="trainer", timeout=5) as trainer:
        trainer.reset_prefix_cache()
        assert trainer.generate([1], ONE)[0].finished


def test_health_needs_no_token(guarded):
    with grpc.insecure_channel(guarded.address) as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)


def test_hosts_beyond_loopback_need_a_token_and_tls_or_a_word(bare_checkpoint, caplog):
    assert is_loopback("127.0.0.1")
    assert is_loopback("[::1]")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")
    with Rollout(bare_checkpoint, **SETTINGS) as rollout:
        with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
            rollout.serve("0.0.0.0")
        with pytest.raises(ConfigError, match="--insecure"):
            rollout.serve("0.0.0.0", token="secret")
        with caplog.at_level(logging.WARNING, "rollout"):
            served = rollout.serve("0.0.0.0", token="secret", insecure=True)
        assert served.startswith("0.0.0.0:")
        assert "in clear on 0.0.0.0" in caplog.text


PAUSE, SAMPLE, UPDATE = (
    f"/rollout.v1.{name}" for name in ("Control/Pause", "Generation/Generate", "WeightSync/Update")
)


def test_one_token_allows_everything_where_it_is_the_only_one():
    tokens = Tokens(generation="t")
    assert tokens.refusal(PAUSE, "Bearer t") is None
    assert tokens.refusal(PAUSE, "Bearer x")
    assert tokens.refusal(SAMPLE, "Basic t")
    assert tokens.refusal(SAMPLE, None)
    control = Tokens(control="c")
    assert control.refusal(SAMPLE, None) is None
    assert control.refusal(UPDATE, None)


def test_missing_wrong_and_insufficient_tokens_are_three_sentences():
    tokens = Tokens(generation="g", control="c")
    assert "the control token, and none was given" in tokens.refusal(PAUSE, None)
    assert "a token, and none was given" in tokens.refusal(SAMPLE, None)
    assert "is the one for generation" in tokens.refusal(PAUSE, "Bearer g")
    for given in ("Bearer x", "bearer gg", "Bearer c "):
        assert "is wrong" in tokens.refusal(PAUSE, given)
    for given in ("Basic c", "Bearer", "Bearer ", "c"):
        assert "another form" in tokens.refusal(PAUSE, given)
    assert tokens.refusal(PAUSE, "bearer c") is None


@pytest.mark.parametrize("token", ["", " ", "\t\n", "two words", "schön", "line\n"])
def test_a_token_that_guards_nothing_or_fits_no_header_is_refused(token):
    for kind in ("generation", "control"):
        with pytest.raises(ConfigError, match=kind):
            Tokens(**{kind: token})


def test_the_generation_token_aborts_its_own_requests_alone(guarded):
    """Everybody's belong to control, as over HTTP."""
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    with (
        Rollout.connect(guarded.address, token="sampler", timeout=10) as sampler,
        Rollout.connect(guarded.address, token="trainer", timeout=10) as trainer,
    ):
        stream = sampler.stream([1, 2], long)
        request = next(stream).request_id
        with pytest.raises(ConfigError, match="one for generation"):
            sampler.abort()
        assert guarded.metrics().running == 1
        assert sampler.abort([request]) == 1
        assert list(stream)[-1].outputs[0].finish_reason == "abort"
        assert trainer.abort() == 0


def test_every_grpc_method_says_what_it_asks_of_its_caller():
    methods = [
        f"/{service.full_name}/{method.name}"
        for module in (pb.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
        for service in module.services_by_name.values()
        for method in service.methods
    ]
    assert set(methods) == {route for _, route in ROUTES if route.count(".")} - {ABORT_ALL}
    assert Tokens(generation="g", control="c").refusal("/rollout.v1.New/Method", "Bearer g")


def test_a_refused_call_is_never_received(guarded):
    """Whatever kind of call it is, its handler reads no message and can parse none."""
    handler = refusing(grpc.StatusCode.UNAUTHENTICATED, "no")
    assert handler.request_streaming
    assert handler.request_deserializer is None
    with grpc.insecure_channel(guarded.address) as channel:
        for method in (SAMPLE, PAUSE, UPDATE):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(method)(b"\xff" * (20 << 20), timeout=30)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_requests_that_are_no_message_or_too_long_are_invalid(engine):
    with grpc.insecure_channel(engine.address) as channel:
        for method, data, words in (
            (SAMPLE, b"\xff\xff", "not a message"),
            (PAUSE, b"\x0a\xff", "not a message"),
            (UPDATE, b"\xff\xff", "not a message"),
            (PAUSE, b"\x0a" + bytes([0x80, 0x80, 0x80, 1]) + bytes(1 << 21), "at most 1048576"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(channel.unary_stream(method)(data, timeout=30))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method
            assert words in caught.value.details()
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(SAMPLE)(bytes(MAX_BODY + 1), timeout=30))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), -1.0, 1e300])
def test_a_timeout_that_no_wait_can_have_is_invalid(engine, timeout):
    control, weights = "/rollout.v1.Control/", "/rollout.v1.WeightSync/"
    with grpc.insecure_channel(engine.address) as channel:
        for method, request in (
            (f"{control}Pause", pb.PauseRequest(mode="wait", timeout=timeout)),
            (f"{control}Sleep", pb.SleepRequest(level=1, timeout=timeout)),
            (f"{control}WakeUp", pb.WakeUpRequest(timeout=timeout)),
            (f"{weights}Digests", pb.DigestsRequest(timeout=timeout)),
            (f"{weights}Rollback", pb.RollbackRequest(timeout=timeout)),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(method)(request.SerializeToString(), timeout=30)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method
    assert engine.metrics().state == "running"


@pytest.mark.parametrize("rest", [[b"K\x92"], []])
def test_a_held_update_ends_with_a_client_that_says_no_more(engine, eventually, rest):
    """Or says what is no command: its grace is for connections that break."""
    offer = {"grace": 0.5, "senders": 2}
    request = UpdateRequest(
        update_id=f"u{len(rest)}", bucket_bytes=1 << 10, timeout=120.0, offer=offer
    )
    begin = to_json(request)
    command = pb.UpdateCommand(begin=pb.WeightDocument(json=begin)).SerializeToString()
    begun = threading.Event()

    def commands():
        yield command
        assert begun.wait(30)
        yield from rest

    with grpc.insecure_channel(engine.address) as channel:
        call = channel.stream_stream(UPDATE)(commands(), timeout=60)
        next(call)
        begun.set()
        with pytest.raises(grpc.RpcError):
            list(call)
    assert call.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE)
    eventually(lambda: engine.weight_info().state == "idle", 30)  # of 120


def test_a_path_with_a_null_byte_is_named(engine):
    with (
        Rollout.connect(engine.address, timeout=10) as client,
        pytest.raises(ConfigError, match="null byte"),
    ):
        client.update_weights(server_path="a\0b")


def test_a_busy_port_and_a_host_that_is_none_of_this_machines_are_named(bare_checkpoint):
    with socket.socket() as taken, Rollout(bare_checkpoint, **SETTINGS) as rollout:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port} for gRPC.*in use; choose another port"):
            rollout.serve(port=port)
        for host in ("nobody.invalid", "192.0.2.1"):
            with pytest.raises(ConfigError, match=rf"{host}:0 for gRPC.*give an address of this"):
                rollout.serve(host, token="t", insecure=True)
        assert rollout.generate([1], ONE)[0].finished


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tokn": "t"}, "serve takes no 'tokn'; did you mean 'token'"),
        ({"token": 5}, "the generation token must be a text"),
        ({"tls": "cert.pem"}, "tls must be a ServerTls"),
        ({"insecure": "false"}, "insecure must be True or False"),
        ({"max_body_bytes": "1 GiB"}, "max_body_bytes must be 1 or more"),
        ({"host": ""}, "serve takes a host"),
    ],
)
def test_what_a_server_cannot_be_given_is_named_and_the_next_call_serves(
    bare_checkpoint, wrong, words
):
    with Rollout(bare_checkpoint, **SETTINGS) as rollout:
        with pytest.raises(ConfigError, match=words):
            rollout.serve(**wrong)
        rollout.serve(max_body_bytes=1 << 40)  # more than gRPC can count


def test_an_unreachable_server_is_named_with_the_remedy():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = time.monotonic()
    with pytest.raises(EngineClosed, match=address) as caught:
        Rollout.connect(address, timeout=60)
    assert "rollout serve" in str(caught.value)
    assert time.monotonic() - started < 30


def test_a_server_that_stops_ends_calls_as_engine_closed(bare_checkpoint):
    with Rollout(bare_checkpoint, **SETTINGS) as rollout:
        client = Rollout.connect(rollout.address, timeout=5)
    with client, pytest.raises(EngineClosed):
        client.generate([1], ONE)


async def test_thousands_of_calls_at_once_are_all_answered(engine):
    async with grpc.aio.insecure_channel(engine.address) as channel:
        ask = ControlStub(channel).ServerInfo
        replies = await asyncio.gather(*(ask(pb.ServerInfoRequest()) for _ in range(4000)))
    assert {reply.state for reply in replies} == {"running"}


def test_grpc_knows_every_option_that_it_is_given():
    """It ignores what it does not know: a misspelt limit of pings cut calls that were quiet."""
    known = Path(cygrpc.__file__).read_bytes()
    options = [key for key, _ in (*CHANNEL_OPTIONS, *SERVER_OPTIONS)]
    assert [key for key in options if key.encode() not in known] == []
