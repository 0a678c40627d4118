"""The server's doors: ports, tokens, health, reflection, and clients that find nobody."""

import socket
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from rollout import Rollout, SamplingParams
from rollout.errors import ConfigError, EngineClosed
from rollout.rollout_pb2 import GenerateRequest
from rollout.rollout_pb2_grpc import GenerationStub
from rollout.server.auth import Tokens, is_loopback

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


def test_a_foreign_client_gets_a_status_for_an_empty_prompt_message(engine):
    with grpc.insecure_channel(engine.address) as channel:
        call = GenerationStub(channel).Generate(GenerateRequest(prompts=[{}]), timeout=5)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


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


def test_hosts_beyond_loopback_need_a_token(bare_checkpoint):
    assert is_loopback("127.0.0.1")
    assert is_loopback("[::1]")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")
    with Rollout(bare_checkpoint, **SETTINGS) as rollout:
        with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
            rollout.serve("0.0.0.0")
        assert rollout.serve("0.0.0.0", token="secret").startswith("0.0.0.0:")


def test_one_token_allows_everything_where_it_is_the_only_one():
    tokens = Tokens(generation="t")
    assert tokens.allows("/rollout.v1.Control/Pause", "Bearer t")
    assert not tokens.allows("/rollout.v1.Control/Pause", "Bearer x")
    assert not tokens.allows("/rollout.v1.Generation/Generate", "Basic t")
    assert not tokens.allows("/rollout.v1.Generation/Generate", None)
    control = Tokens(control="c")
    assert control.allows("/rollout.v1.Generation/Generate", None)
    assert not control.allows("/rollout.v1.WeightSync/Update", None)


def test_a_busy_port_is_named(bare_checkpoint):
    with socket.socket() as taken, Rollout(bare_checkpoint, **SETTINGS) as rollout:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            rollout.serve(port=port)
        assert rollout.generate([1], ONE)[0].finished


def test_an_unreachable_server_is_named_with_the_remedy():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = time.monotonic()
    with pytest.raises(EngineClosed, match=address) as caught:
        Rollout.connect(address, timeout=5)
    assert "rollout serve" in str(caught.value)
    assert time.monotonic() - started < 5


def test_a_server_that_stops_ends_calls_as_engine_closed(bare_checkpoint):
    with Rollout(bare_checkpoint, **SETTINGS) as rollout:
        client = Rollout.connect(rollout.address, timeout=5)
    with client, pytest.raises(EngineClosed):
        client.generate([1], ONE)
