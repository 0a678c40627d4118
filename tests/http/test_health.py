"""Health is what a request would meet: readiness, liveness, and gRPC's own health service."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from free_ports import free_port
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from serving import Served
from shared_engines import eventually
from starlette.testclient import TestClient
from tiny_models import write_tiny

from rollout import AsyncRollout, Rollout
from rollout.errors import EngineClosed, RolloutError
from rollout.server.http.app import build_app
from rollout.server.service import Listening, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
BODY = {"prompt": [5, 6], "max_tokens": 2}
CPU = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("health") / "tiny"
    write_tiny(path)
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Rollout]:
    with Rollout(str(model), **CPU) as rollout:
        yield rollout


@pytest.fixture(scope="module")
def health(engine: Rollout) -> Iterator[HealthStub]:
    with grpc.insecure_channel(engine.address) as channel:
        yield HealthStub(channel)


def check(health: HealthStub, service: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return int(health.Check(request, timeout=30).status)


async def http(engine: Rollout, path: str) -> tuple[int, Any]:
    """GET in this thread's loop: neither route needs the engine's."""
    transport = httpx.ASGITransport(build_app(engine._async))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        reply = await client.get(path)
    return reply.status_code, reply.json()["status"]


async def looks(engine: Rollout, health: HealthStub) -> tuple[Any, ...]:
    """Readiness by HTTP and by gRPC, liveness, and whether updates are taken."""
    ready, state = await http(engine, "/health")
    assert (await http(engine, "/ping")) == (ready, state)
    live, _ = await http(engine, "/live")
    generation = check(health) == check(health, "rollout.v1.Generation") == SERVING
    weights = check(health, "rollout.v1.WeightSync") == SERVING
    return state, ready, generation, live, weights


READY = ("running", 200, True, 200, True)


async def test_health_follows_the_engine(engine: Rollout, health: HealthStub) -> None:
    assert await looks(engine, health) == READY
    engine.pause_generation()
    assert await looks(engine, health) == ("paused", 503, False, 200, True)
    engine.resume_generation()
    engine.sleep(1)
    assert await looks(engine, health) == ("asleep", 503, False, 200, True)
    engine.wake_up()
    assert await looks(engine, health) == READY
    core = engine._async.backend.core
    core.mark_broken("for a test")
    assert await looks(engine, health) == ("broken", 503, False, 200, True)
    with pytest.raises(RolloutError):
        engine.generate([1])
    core.mark_broken(None)
    assert engine.generate([1])[0].finished
    assert await looks(engine, health) == READY


async def test_an_update_without_a_pause_is_healthy(engine: Rollout, health: HealthStub) -> None:
    """Also one that holds generation back for a moment, or lets what has begun finish first."""
    core = engine._async.backend.core
    core.control.hold(30)
    assert await looks(engine, health) == READY
    core.control.release()
    core.control.drain(30)
    assert await looks(engine, health) == READY
    core.control.undrain()


def test_watchers_are_told_of_every_change(engine: Rollout, health: HealthStub) -> None:
    watch = health.Watch(health_pb2.HealthCheckRequest(service=""), timeout=60)
    unknown = health.Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=60)
    assert next(watch).status == SERVING
    engine.pause_generation()
    assert next(watch).status == NOT_SERVING
    engine.resume_generation()
    assert next(watch).status == SERVING
    assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()
    unknown.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        check(health, "nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_dead_rank_is_neither_ready_nor_alive(model: Path) -> None:
    settings = {**CPU, "executor": "multiprocess"}
    with Rollout(str(model), **settings) as engine:
        engine.generate([1])
        with grpc.insecure_channel(engine.address) as channel:
            health = HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert next(watch).status == SERVING
            engine._async.backend.core._executor._links[0].process.kill()
            assert next(watch).status == NOT_SERVING
            assert await looks(engine, health) == ("dead", 503, False, 503, False)
            assert engine.weight_info().state == "dead"
    assert await http(engine, "/health") == (503, "closed")


def test_an_engine_that_cannot_start_is_dead(tmp_path: Path) -> None:
    rollout = AsyncRollout(str(tmp_path / "nowhere"))
    with TestClient(build_app(rollout)) as client:
        assert client.get("/health").json() == {"status": "loading"}
        assert client.get("/live").status_code == 200
        assert client.get("/v1/models").status_code == 503

        async def start() -> None:
            with pytest.raises(RolloutError):
                await rollout.start()

        client.portal.call(start)
        assert client.get("/health").json() == {"status": "dead"}
        assert client.get("/live").status_code == 503


async def test_the_http_port_answers_while_the_model_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load is held back, seen from outside, let go; then the same port serves."""
    from rollout.api.embedded import EmbeddedBackend

    go_on, load = threading.Event(), EmbeddedBackend._load

    def held(self: EmbeddedBackend) -> None:
        assert go_on.wait(60)
        load(self)

    monkeypatch.setattr(EmbeddedBackend, "_load", held)
    import asyncio

    port = free_port()
    opened, done = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        async with serving(AsyncRollout(model, **CPU), Listening(port=port)):
            opened.set()
            await done.wait()

    task = asyncio.create_task(run())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        end = time.monotonic() + 60
        while True:
            try:
                reply = await client.get("/health")
                break
            except httpx.ConnectError:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
        assert (reply.status_code, reply.json()) == (503, {"status": "loading"})
        assert (await client.get("/live")).status_code == 200
        early = await client.post("/v1/completions", json=BODY)
        assert early.status_code == 503
        assert "loading" in early.json()["error"]["message"]
        assert not opened.is_set()
        go_on.set()
        await asyncio.wait_for(opened.wait(), 60)
        assert (await client.get("/health")).json() == {"status": "running"}
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    done.set()
    await task


def test_an_http_port_given_to_a_grpc_client_is_named_with_the_right_one(served: Served) -> None:
    port = served.grpc.rpartition(":")[2]
    words = f"{served.http}: it is an HTTP port; the gRPC port of this service is {port}"
    with pytest.raises(EngineClosed, match=words):
        Rollout.connect(served.http, timeout=10)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever).start()
        with pytest.raises(EngineClosed, match="it is an HTTP port; give the gRPC port"):
            Rollout.connect(f"127.0.0.1:{other.server_port}", timeout=10)
        other.shutdown()


def test_connections_are_probed_while_nothing_is_said(served: Served) -> None:
    """What forgets idle ones would lose the answer; and who waits on a host that is gone, waits."""
    host, _, port = served.http.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as sock:
        sock.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(9) == b"HTTP/1.1 "
        ends = (f":{int(port):04X}", f":{sock.getsockname()[1]:04X}")

        def timer() -> list[str]:
            """What kind, and in how many hundredths of a second; 01 until the answer has come."""
            rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()]
            [row] = [r for r in rows if r[1].endswith(ends[0]) and r[2].endswith(ends[1])]
            return row[5].split(":")

        eventually(lambda: timer()[0] == "02", 3)  # a probe
        assert int(timer()[1], 16) <= 20 * 100
