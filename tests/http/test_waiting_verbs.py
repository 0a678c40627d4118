"""Whatever verbs wait for, at any door: what needs no wait answers, and refusals leave nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio
from tiny_models import write_tiny

from rollout import AsyncRollout, Rollout, SamplingParams
from rollout.errors import EngineOverloaded, InvalidRequest, VersionConflict
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.services import ControlStub
from rollout.server.http.app import build_app

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
HANG = 60.0  # seconds; nothing here takes one
THREADS = 2  # of the loop's own pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncRollout]:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, tokenizer=True)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    async with AsyncRollout(
        str(path), device="cpu", num_threads=1, num_kv_blocks=64, max_model_len=512,
        max_num_seqs=4, max_queued_requests=4,
    ) as rollout:  # fmt: skip
        yield rollout


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(engine: AsyncRollout) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=build_app(engine), raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://engine", timeout=HANG
    ) as client:
        yield client


async def until(condition: object) -> None:
    async with asyncio.timeout(HANG):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_a_reset_of_what_runs_leaves_the_pauses_of_others_alone(
    engine: AsyncRollout, http: httpx.AsyncClient
) -> None:
    """Somebody pauses before the step boundary at which it is done."""
    core, go = engine.backend.core, threading.Event()
    core.at_step_boundary(lambda: go.wait(HANG))
    paused = asyncio.create_task(engine.pause_generation())
    await asyncio.sleep(0.1)
    asked = http.post("/reset_prefix_cache?reset_running_requests=true")
    reset = asyncio.create_task(asked)
    await asyncio.sleep(0.1)
    go.set()
    assert (await reset).status_code == 200
    await paused
    assert core.state == "paused"
    await engine.resume_generation()


async def test_whether_it_is_paused_is_said_in_a_sleep_too(
    engine: AsyncRollout, http: httpx.AsyncClient
) -> None:
    async def said() -> tuple[bool, bool]:
        paused, asleep = await http.get("/is_paused"), await http.get("/is_sleeping")
        return paused.json()["is_paused"], asleep.json()["is_sleeping"]

    await engine.sleep(1)
    assert await said() == (False, True)
    await engine.pause_generation()
    assert await said() == (True, True)
    await engine.wake_up()
    assert await said() == (True, False)
    await engine.resume_generation()
    assert await said() == (False, False)


LATER = {"prompt": [5, 6], "max_tokens": 3, "min_version": 1, "request_id": "x"}
ENDS = {
    "/abort_requests": ({"request_ids": ["x"]}, None),
    "/abort_requests?": (None, None),
    "/inference/v1/abort_requests": ({"request_ids": []}, None),
    "/abort_request": ({"rid": "x"}, None),
    "/pause?mode=abort": (None, "/resume"),
    "/sleep?mode=abort": (None, "/wake_up"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDS)
async def test_what_the_engine_has_not_got_yet_ends_where_all_is_aborted(
    engine: AsyncRollout, http: httpx.AsyncClient, path: str, stream: bool
) -> None:
    body, then = ENDS[path]
    waits = http.post("/v1/completions", json={**LATER, "stream": stream})
    waiting = asyncio.create_task(waits)
    await until(lambda: engine.backend._calls.num_coming)
    assert (await http.get("/load")).json() == {"server_load": 1}
    done = await http.post(path, json=body)
    assert done.status_code == 200
    if "/abort_requests" in path:
        assert done.json() == {"aborted": 1}
    reply = await asyncio.wait_for(waiting, HANG)
    assert reply.status_code == 200
    assert '"finish_reason":"abort"' in reply.text.replace(": ", ":")
    assert (await http.get("/load")).json() == {"server_load": 0}
    assert (await http.post(then)).status_code == 200 if then else True


async def test_what_waits_for_its_grammar_is_aborted(
    engine: AsyncRollout, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles: list[Future[None]] = []

    def compile_never(spec: object) -> Future[None]:
        compiles.append(Future())
        return compiles[-1]

    monkeypatch.setattr(engine.backend.core.grammars, "compile", compile_never)
    body = {"prompt": [5], "request_id": "x", "structured_outputs": {"regex": "a+"}}
    waiting = asyncio.create_task(http.post("/v1/completions", json=body))
    await until(lambda: compiles)
    assert (await http.post("/abort_requests")).json() == {"aborted": 1}
    choice = (await asyncio.wait_for(waiting, HANG)).json()["choices"][0]
    assert (choice["finish_reason"], choice["text"]) == ("abort", "")
    assert compiles[0].cancelled(), "nobody waits for it any more"


async def test_a_request_id_of_several_prompts_aborts_them_all(
    engine: AsyncRollout, http: httpx.AsyncClient
) -> None:
    body = {"prompt": [[5], [6]], "max_tokens": 200, "ignore_eos": True, "request_id": "y"}
    asked = asyncio.create_task(http.post("/v1/completions", json=body))
    await until(lambda: engine.backend._calls.ids == {"y-0", "y-1"})
    assert (await http.post("/abort_requests", json={"request_ids": ["y"]})).json() == {
        "aborted": 2
    }
    choices = (await asked).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]


async def test_verbs_that_wait_take_nothing_from_health_text_and_resume(
    engine: AsyncRollout, http: httpx.AsyncClient
) -> None:
    core, coordinator = engine.backend.core, engine.backend.coordinator
    running = asyncio.create_task(engine.generate([5, 6, 7], LONG))
    await until(lambda: core.scheduler.running)
    await engine.pause_generation("keep")  # so that it cannot end
    coordinator.turn.take(None, 5)  # as an update under way does
    pauses = [asyncio.create_task(http.post("/pause?mode=wait&timeout=50")) for _ in range(12)]
    updates = [asyncio.create_task(engine.rollback(timeout=50)) for _ in range(8)]
    await until(lambda: len(core.loop._drains) == 12)
    await asyncio.sleep(0.05)

    async with asyncio.timeout(10):
        assert (await http.get("/health")).status_code in (200, 503)
        assert (await http.get("/metrics")).status_code == 200
        told = await http.post("/tokenize", json={"prompt": "Hello, world"})
        assert told.json()["count"] > 0
        assert (await http.get("/weight_info")).json()["state"] == "staging"
        assert await engine.abort(["nobody"]) == 0
    assert not any(task.done() for task in (*pauses, *updates, running))

    assert (await http.post("/resume")).status_code == 200
    text = await http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
    assert text.status_code == 200
    assert (await running)[0].outputs[0].finish_reason == "length"
    assert {reply.status_code for reply in await asyncio.gather(*pauses)} == {200}
    coordinator.turn.end(None)
    ended = await asyncio.gather(*updates, return_exceptions=True)
    assert all(isinstance(error, VersionConflict) for error in ended)
    await engine.resume_generation()


async def test_more_waiting_verbs_than_threads_are_refused_by_name(engine: AsyncRollout) -> None:
    coordinator = engine.backend.coordinator
    coordinator.turn.take(None, 5)
    waiting = [asyncio.create_task(engine.rollback(timeout=50)) for _ in range(64)]
    await asyncio.sleep(0)
    try:
        with pytest.raises(EngineOverloaded, match="64 verbs about weights wait"):
            await engine.rollback()
        assert (await engine.weight_info()).version == 0
    finally:
        coordinator.turn.end(None)
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("timeout", ["1e300", "inf", "nan", "-1", "86401"])
async def test_an_absurd_timeout_is_refused_at_every_door_and_pauses_nothing(
    engine: AsyncRollout, http: httpx.AsyncClient, timeout: str
) -> None:
    for verb in ("pause?mode=wait&", "pause?mode=keep&", "sleep?", "wake_up?"):
        reply = await http.post(f"/{verb}timeout={timeout}")
        assert reply.status_code == 400
        assert "timeout" in reply.json()["error"]["message"]
    async with grpc.aio.insecure_channel(await engine.address) as channel:
        for method, request in (
            ("Pause", pb.PauseRequest(mode="wait", timeout=float(timeout))),
            ("Sleep", pb.SleepRequest(level=1, timeout=float(timeout))),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(ControlStub(channel), method)(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for call in (
        engine.pause_generation("wait", float(timeout)),
        engine.sleep(1, timeout=float(timeout)),
        engine.rollback(float(timeout)),
    ):
        with pytest.raises(InvalidRequest, match="at most 86400"):
            await call
    assert (await engine.metrics()).state == "running"
    assert (await http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})).is_success


async def test_a_full_queue_is_429_and_resource_exhausted_and_a_call_is_taken_whole(
    engine: AsyncRollout, http: httpx.AsyncClient
) -> None:
    few = {"max_tokens": 2, "ignore_eos": True}
    await engine.pause_generation("keep")
    large = asyncio.create_task(engine.generate([[5], [6]], SamplingParams(n=3, **few)))
    await until(lambda: engine.backend.core.scheduler.num_waiting == 6)
    body = {"prompt": [[5], [6]], **few}
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 429
    assert int(reply.headers["retry-after"]) >= 1
    assert "max_queued_requests is 4" in reply.json()["error"]["message"]
    assert reply.json()["error"]["type"] == "EngineOverloaded"
    for _ in range(2):  # an id that was refused is free
        with pytest.raises(EngineOverloaded, match="6 sequences wait already"):
            await engine.generate([5], request_ids=["a"])
    address = await engine.address

    def from_elsewhere() -> None:
        with Rollout.connect(address) as client:
            client.generate([5])

    with pytest.raises(EngineOverloaded):
        await asyncio.to_thread(from_elsewhere)
    await engine.resume_generation()
    assert [len(output.outputs) for output in await large] == [3, 3]
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert engine.backend.core.inputs._coming == 0
