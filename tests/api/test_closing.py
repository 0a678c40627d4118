"""Nobody waits for an engine that was shut down."""

from __future__ import annotations

import asyncio

import pytest
from api.conftest import ENGINE

from rollout import AsyncRollout, RequestOutput, Rollout, SamplingParams
from rollout.errors import EngineClosed, EngineError


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
