"""What a front asks of a member, for as long as that one can serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc

from rollout.errors import EngineError
from rollout.fleet.calls.lost import LOST

T = TypeVar("T")
PATIENCE = 2.0  # leases until a member that does not answer has to be out of service
LOOKS = 16  # in a lease, at whether it serves


async def answer_of(
    asked: Coroutine[Any, Any, T], is_out: Callable[[], bool], lease: float
) -> tuple[T, ...]:
    """Its answer; () once the member ``is_out`` before it has given one. Raises what it raises."""
    task = asyncio.ensure_future(asked)
    try:
        while not task.done() and not is_out():
            await asyncio.wait((task,), timeout=lease / LOOKS)
        return (task.result(),) if task.done() else ()
    finally:
        task.cancel()


async def is_taken(
    asked: Coroutine[Any, Any, None], is_out: Callable[[], bool], lease: float
) -> bool:
    """True once the member has done it; False once it can serve no more, as at a commit.

    Raises what it refuses with, and why it was not reached if it serves on.
    """
    try:
        return bool(await answer_of(asked, is_out, lease))
    except EngineError as error:
        # One that is gone has not refused: its lease, which nobody renews, ends by itself.
        if not isinstance(error, LOST) and not isinstance(error.__cause__, grpc.RpcError):
            raise
        until = asyncio.get_running_loop().time() + PATIENCE * lease
        while not is_out():
            if asyncio.get_running_loop().time() >= until:
                raise
            await asyncio.sleep(lease / LOOKS)
        return False
