"""What every dialect answers with: streams of events, and calls that end when a client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from rollout.api import AsyncRollout
from rollout.api.backend import Outputs
from rollout.engine.pause_state import PAUSED
from rollout.engine.tokenizer import Tokenizer
from rollout.errors import DeadlineExceeded, InvalidRequest, RolloutError, VersionConflict
from rollout.generation import RequestOutput, SamplingParams
from rollout.generation.sampling_params import MAX_NAME
from rollout.server.http.parsers import Decode

T = TypeVar("T")
SESSION, ROUTING_KEY = "x-session-id", "x-smg-routing-key"


class EventStream(StreamingResponse):
    """Closes its events when the client has left, also where it was cancelled between two."""

    def __init__(self, events: AsyncGenerator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await super().__call__(scope, receive, send)


async def first_of(outputs: Outputs) -> tuple[int, RequestOutput]:
    """The first output; where none comes, whatever the reason, nothing of the call is left.

    Awaited before an answer begins, so that a refused request is an error, not a stream.
    """
    try:
        return await anext(outputs)
    except StopAsyncIteration:
        raise InvalidRequest("the call has no prompts") from None
    except BaseException:  # also where the client has left
        await outputs.aclose()
        raise


def within(
    seconds: float | None, rollout: AsyncRollout, params: SamplingParams, outputs: Outputs
) -> Outputs:
    """``outputs``, which are aborted ``seconds`` from now; None: whenever they end.

    Raises ``DeadlineExceeded``, or ``VersionConflict`` where ``min_version`` has not come.
    """
    return outputs if seconds is None else _within(seconds, rollout, params, outputs)


async def _within(
    seconds: float, rollout: AsyncRollout, params: SamplingParams, outputs: Outputs
) -> Outputs:
    clock = asyncio.get_running_loop().time
    async with contextlib.aclosing(outputs):
        until = clock() + seconds
        while True:
            try:
                item = await asyncio.wait_for(anext(outputs), until - clock())
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                if isinstance(error, RolloutError):
                    raise
                info, wanted = await rollout.server_info(), params.min_version or 0
                if info.version < wanted:
                    raise VersionConflict(
                        f"version {wanted} was asked for (min_version) and did not become live "
                        f"within the request's timeout of {seconds:g} s: version {info.version} is"
                    ) from None
                raise DeadlineExceeded(
                    f"the request did not end within its timeout of {seconds:g} s, and was aborted"
                    + (f": {PAUSED}" if info.state == "paused" else "")
                ) from None
            yield item


def event(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; cancelled, and a 499 that nobody reads, when the client goes away."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise HTTPException(499, "the client has gone")
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def served_model(rollout: AsyncRollout, asked: str | None) -> str:
    """What to call it: its name, or that of a loaded adapter (``name``, or ``base:name``); a
    request for another is a 404.
    """
    served = (await rollout.server_info()).model
    known = (served, *adapter_names(rollout))
    if asked is None:
        return served
    if asked.removeprefix(f"{served}:") not in known:
        message = f"the model {asked!r} does not exist; this server serves {', '.join(known)}"
        raise HTTPException(404, message)
    return asked


def in_session(params: SamplingParams, headers: Headers) -> SamplingParams:
    """``params`` with the session that ``headers`` name, where they name none themselves:
    ``X-Session-ID``, or what SGLang's router goes by.
    """
    name = headers.get(SESSION) or headers.get(ROUTING_KEY)
    if params.session_id is not None or not name:
        return params
    return replace(params, session_id=name[:MAX_NAME])


async def sampled_by(
    rollout: AsyncRollout, asked: str | None, params: SamplingParams
) -> tuple[str, SamplingParams]:
    """What to call the model that a request named, and its params with the adapter in them, where
    the name is that of one that is served unmerged.
    """
    model = await served_model(rollout, asked)
    served = rollout.backend.served
    if served is None or not served.max_adapters:
        return model, params
    base = (await rollout.server_info()).model
    name = model.removeprefix(f"{base}:")
    if name == base:
        return model, params
    if params.adapter not in (None, name):
        raise InvalidRequest(f"model names the adapter {name!r}, and adapter {params.adapter!r}")
    # Looked up once, by the engine: one that has been unloaded meanwhile is refused there.
    return model, replace(params, adapter=name)


def tokenizer_of(rollout: AsyncRollout) -> Tokenizer | None:
    """The engine's, where this is its own server and it has one."""
    served = rollout.backend.served
    return None if served is None else served.tokenizer


def decoder_of(rollout: AsyncRollout) -> Decode | None:
    """Its text of tokens, special ones included."""
    tokenizer = tokenizer_of(rollout)
    return None if tokenizer is None else partial(tokenizer.decode, skip_special_tokens=False)


def adapter_names(rollout: AsyncRollout) -> tuple[str, ...]:
    """Of the adapters that requests may name as their model."""
    served = rollout.backend.served
    return () if served is None else served.adapter_names
