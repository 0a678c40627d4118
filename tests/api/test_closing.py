"""Nobody waits for an engine that was shut down."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from api.conftest import ENGINE
from shared_engines import eventually

from rollout import AsyncRollout, RequestOutput, Rollout, SamplingParams
from rollout.api import loop_thread
from rollout.api.loop_thread import LoopThread
from rollout.errors import ConfigError, EngineClosed, EngineError, SourceFailed


async def test_generations_beside_a_shutdown_all_end(bare_checkpoint: str) -> None:
    rollout = AsyncRollout(bare_checkpoint, **ENGINE)
    await rollout.start()
    params = SamplingParams(max_tokens=100)

    async def calls() -> list[RequestOutput]:
        return [out for _ in range(50) for out in await rollout.generate([1, 2, 3], params)]

    tasks = [asyncio.create_task(calls()) for _ in range(28)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        await rollout.shutdown()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, EngineError) for error in ended)


async def test_each_says_what_it_is_and_is_not_entered_again(bare_checkpoint: str) -> None:
    engine = AsyncRollout(bare_checkpoint, **ENGINE)
    assert repr(engine) == f"<AsyncRollout of {bare_checkpoint}, version 0>"
    async with engine:
        address = await engine.serve()
        assert repr(engine) == f"<AsyncRollout of {bare_checkpoint}, version 0, at {address}>"
        client = await asyncio.to_thread(Rollout.connect, address)
        assert repr(client) == f"<Rollout at {address}>"
        await asyncio.to_thread(client.shutdown)
        assert repr(client) == f"<Rollout at {address}, shut down>"
        with pytest.raises(EngineClosed, match="was shut down; make a new one"), client:
            pass
    assert repr(engine).endswith(", shut down>")
    with pytest.raises(EngineClosed, match="was shut down; make a new one"):
        async with engine:
            pass


def test_a_client_that_was_shut_down_changes_no_weights(engine: Rollout) -> None:
    client = Rollout.connect(engine.address, timeout=10)
    live = client.weight_info().version
    client.shutdown()
    sends_nothing = {"model.norm.weight": None}
    for verb in (lambda: client.update_weights(sends_nothing), client.rollback, client.weight_info):
        with pytest.raises(EngineClosed, match="this Rollout was shut down; make a new one"):
            verb()
    assert engine.weight_version == live


async def test_no_verb_of_what_was_shut_down_reaches_an_engine(
    engine: Rollout, bare_checkpoint: str
) -> None:
    client = AsyncRollout.connect(engine.address, timeout=10)
    await client.start()
    began, unused = AsyncRollout(bare_checkpoint, **ENGINE), AsyncRollout(bare_checkpoint, **ENGINE)
    await began.start()
    for closed in (client, began, unused):
        await closed.shutdown()
        for verb in (
            closed.start(),
            closed.generate([1, 2], {"max_tokens": 1}),
            closed.pause_generation(),
            closed.metrics(),
            closed.weight_version,
            closed.address,
            closed.serve(),
        ):
            with pytest.raises(EngineClosed, match="this Rollout was shut down; make a new one"):
                await verb
        assert await closed.state() == "closed"
    assert engine.metrics().state == "running"


@pytest.mark.parametrize("thread", ["loop", "call", "engine"])
def test_garbage_that_is_found_in_a_thread_of_its_own_ends_all_the_same(
    bare_checkpoint: str, thread: str
) -> None:
    """As in a server that is dropped in a cycle: its own threads are those that go on."""
    gc.collect()
    gc.disable()  # until that thread looks
    try:
        rollout: Any = Rollout(bare_checkpoint, **ENGINE)
        assert rollout.address
        rollout.held = rollout  # a cycle
        core, loop, dropped = rollout._async.backend.core, rollout._loop, threading.Event()

        def collect() -> None:
            dropped.wait()
            gc.collect()

        if thread == "loop":
            loop._loop.call_soon_threadsafe(collect)
        elif thread == "call":
            loop._pool.submit(collect)
        else:
            core.at_step_boundary(collect)
        left, owner = weakref.ref(rollout), loop._thread
        del rollout, loop
        dropped.set()
        eventually(lambda: left() is None and core.state == "closed" and not owner.is_alive())
    finally:
        gc.enable()


def test_a_subclass_that_fails_to_start_says_why() -> None:
    class Logged(Rollout):
        def __init__(self, model: str) -> None:
            super().__init__(model, **ENGINE)
            self.log = [model]

        def shutdown(self) -> None:
            self.log.append("ended")
            super().shutdown()

    with pytest.raises(ConfigError, match="no directory here"):
        Logged("/nonexistent")


@pytest.mark.parametrize("cyclic", [False, True])
def test_what_a_users_thread_drops_has_ended_when_the_thread_goes_on(
    bare_checkpoint: str, cyclic: bool
) -> None:
    """Its memory and its port are free for the next one."""

    def work() -> list[str]:
        rollout: Any = Rollout(bare_checkpoint, **ENGINE)
        assert rollout.address
        core = rollout._async.backend.core
        if cyclic:
            rollout.held = rollout
        del rollout
        gc.collect()
        return [core.state]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == ["closed"]


def test_the_interpreter_waits_for_the_end_of_garbage(bare_checkpoint: str) -> None:
    """That a thread of its own found as the main one came to its end."""
    ended = subprocess.run(
        [sys.executable, "-c", GARBAGE_AT_THE_END, bare_checkpoint],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert ended.stdout.split() == ["last", "closed"]


GARBAGE_AT_THE_END = """
import gc, sys, threading, time
from rollout import Rollout
from rollout.api import sync_rollout

def shut_down(rollout, loop, real=sync_rollout._shut_down):
    leaving.wait()
    time.sleep(0.5)
    real(rollout, loop)
    print(rollout.backend.core.state, flush=True)

def collect():
    dropped.wait()
    gc.collect()
    found.set()

sync_rollout._shut_down = shut_down
gc.disable()
leaving, dropped, found = (threading.Event() for _ in range(3))
rollout = Rollout(
    sys.argv[1], device="cpu", num_threads=1, num_kv_blocks=128, max_model_len=512
)
rollout.held = rollout
rollout._loop._loop.call_soon_threadsafe(collect)
del rollout
dropped.set()
found.wait()
print("last", flush=True)
leaving.set()
"""


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_is_sent_to_another_process_is_its_address(engine: Rollout, copied: Any) -> None:
    with Rollout.connect(engine.address) as client:
        for one in (engine, engine._async, client, client._async):
            with pytest.raises(TypeError, match="pass its address on, and make another there"):
                copied(one)
    assert engine.generate([1, 2], {"max_tokens": 1})


FORKS = """
import asyncio, gc, os, signal, sys, warnings
from rollout import AsyncRollout, Rollout
from rollout.errors import EngineClosed

warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads

def tokens(r):
    return len(r.generate([1, 2, 3], {"max_tokens": 3})[0].outputs[0].token_ids)

async def leave(r):
    async with r:
        pass

def child(act):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        try:
            act()
        except EngineClosed as error:
            sys.exit(7 if "forked" in str(error) else str(error))
        sys.exit(0)  # with what the interpreter does at its end
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

settings = {"device": "cpu", "num_threads": 1, "max_num_seqs": 8, "kv_cache_bytes": 1 << 20}
with Rollout(sys.argv[1], tensor_parallel_size=2, **settings) as r:
    gc.freeze()  # a child that goes through all of it at its end would copy every page
    child(lambda: None)
    child(r.shutdown)
    child(lambda: r.__exit__(None, None, None))
    child(lambda: globals().pop("r"))
    child(lambda: tokens(r))
    child(lambda: r.update_weights(sys.argv[1], timeout=10))
    child(lambda: asyncio.run(r._async.shutdown()))
    child(lambda: asyncio.run(leave(r._async)))
    child(lambda: asyncio.run(r._async.session().generate([1, 2])))
    print("tokens", tokens(r), "version", r.update_weights(sys.argv[1]).version)
"""


def test_a_forked_process_ends_nothing_of_its_parents_engine(bare_checkpoint: str) -> None:
    command = [sys.executable, "-c", FORKS, bare_checkpoint]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=270)
    assert not ended.stderr
    assert ended.stdout.split() == [*"000077077", "tokens", "3", "version", "1"]


CONNECTS = """
import os, signal, sys, warnings
from rollout import EngineClosed, Rollout

warnings.simplefilter("ignore", DeprecationWarning)

def child():
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        signal.alarm(30)
        try:
            with Rollout.connect(sys.argv[1], timeout=20) as r:
                r.weight_info()
                print(r.weight_version, flush=True)
        except EngineClosed as error:
            print("spawn" if "spawn it, or fork it before" in str(error) else error, flush=True)
        os._exit(0)
    assert not os.waitpid(pid, 0)[1]

child()
with Rollout.connect(sys.argv[1]) as r:
    r.weight_info()
    child()
child()
"""


def test_a_process_forked_from_one_that_is_connected_is_told_to_be_spawned(
    bare_checkpoint: str,
) -> None:
    with Rollout(bare_checkpoint, **ENGINE) as served:
        command = [sys.executable, "-c", CONNECTS, served.address]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=270)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["0", "spawn", "0"]


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "grpc_stream"])
def test_an_update_whose_client_is_shut_down_meanwhile_ends_at_once_and_says_so(
    engine: Rollout, transport: str, eventually
) -> None:
    client, live = Rollout.connect(engine.address), engine.weight_info()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for index, meta in enumerate(live.tensors):
            yield meta.name, torch.zeros(meta.shape)
            if index == 5:
                pool.submit(client.shutdown).result()

    started = time.monotonic()
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(EngineClosed, match="was closed while the call"),
    ):
        client.update_weights(tensors(), transport=transport, bucket_bytes=4096)
    assert time.monotonic() - started < 5
    eventually(lambda: engine.weight_info().state == "idle")
    assert engine.weight_version == live.version


def test_a_verb_that_waits_says_that_its_client_is_shut_down(engine: Rollout) -> None:
    client, waiting = Rollout.connect(engine.address), []

    def nothing() -> Iterator[tuple[str, torch.Tensor]]:
        waiting.append(pool.submit(client.rollback))  # for the lease of this update
        time.sleep(0.5)
        client.shutdown()
        yield from ()

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(SourceFailed):
            engine.update_weights(nothing())
        with pytest.raises(EngineClosed, match="was closed while the call"):
            waiting[0].result()


def test_calls_that_come_as_the_loop_ends_leave_no_task_and_no_warning(
    caplog, recwarn, monkeypatch
) -> None:
    monkeypatch.setattr(loop_thread, "_LOOK", 0.05)  # which most of these loops wait for

    async def call() -> None: ...

    def calls(thread: LoopThread) -> None:
        with contextlib.suppress(EngineClosed):
            while True:
                thread.run(call())

    with ThreadPoolExecutor(6) as pool:
        for _ in range(40):
            thread = LoopThread()
            asking = [pool.submit(calls, thread) for _ in range(6)]
            thread.run(asyncio.sleep(0.005))
            thread.close()
            for one in asking:
                one.result()
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
    assert [str(warning.message) for warning in recwarn if "never awaited" in str(warning)] == []
