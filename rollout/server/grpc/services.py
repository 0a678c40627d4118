"""The gRPC services of generation and control, and how all services tell errors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from rollout.config import DEFAULT_TIMEOUT, check_timeout
from rollout.errors import InvalidRequest, RolloutError
from rollout.generation import ChatOptions, SamplingParams
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.convert import (
    chat_options_from_json,
    delivered_from_proto,
    info_to_proto,
    messages_from_json,
    output_to_proto,
    params_from_proto,
    prompt_from_proto,
    stats_to_json,
)
from rollout.rpc.status import status_of
from rollout.server.auth import ABORT_ALL, Tokens, authorization_of
from rollout.server.grpc.multiplex import Multiplexed

if TYPE_CHECKING:
    from rollout.api import AsyncRollout
    from rollout.api.backend import Outputs

log = logging.getLogger(__name__)
S = TypeVar("S")
T = TypeVar("T")


async def abort_with(context: Any, error: Exception) -> None:
    """End the call with the status of ``error``; one from outside the tree is logged here."""
    if not isinstance(error, RolloutError):
        log.error("a call failed", exc_info=error)
    await context.abort(*status_of(error))


def checked(request: Any) -> Any:
    """The request; raises the error that stands in the place of one that could not be read."""
    if isinstance(request, RolloutError):
        raise request
    return request


def answers(
    method: Callable[[S, Any], Awaitable[T]],
) -> Callable[[S, Any, Any], Awaitable[T]]:
    """A unary method whose errors become statuses."""

    @wraps(method)
    async def call(self: S, request: Any, context: Any) -> T:
        try:
            return await method(self, checked(request))
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort_with(context, error)
            raise AssertionError("abort raises") from error

    return call


def streams(
    method: Callable[[S, Any], AsyncIterator[T]],
) -> Callable[[S, Any, Any], AsyncIterator[T]]:
    """A server-streaming method whose errors become statuses."""

    @wraps(method)
    async def call(self: S, request: Any, context: Any) -> AsyncIterator[T]:
        try:
            items: Any = method(self, checked(request))
            async with contextlib.aclosing(items):  # a client that left: its requests end now
                async for item in items:
                    yield item
        except Exception as error:  # noqa: BLE001 - the edge of the process
            await abort_with(context, error)

    return call


class GenerationService:
    """``tokens``: who may abort everybody's requests."""

    def __init__(self, rollout: AsyncRollout, tokens: Tokens) -> None:
        self._rollout, self._tokens = rollout, tokens

    @streams
    async def Generate(self, request: Any) -> AsyncIterator[Any]:  # noqa: N802
        async with contextlib.aclosing(self._generated(request)) as outputs:
            async for index, output in outputs:
                yield pb.GenerateResponse(index=index, output=output_to_proto(output))

    @streams
    async def Chat(self, request: Any) -> AsyncIterator[Any]:  # noqa: N802
        async with contextlib.aclosing(self._chatted(request)) as outputs:
            async for index, output in outputs:
                yield pb.GenerateResponse(index=index, output=output_to_proto(output))

    @streams
    async def Multiplex(self, commands: Any) -> AsyncIterator[Any]:  # noqa: N802
        calls = Multiplexed({"generate": self._generated, "chat": self._chatted})
        async with contextlib.aclosing(calls.answers(commands)) as answers:
            async for answer in answers:
                yield answer

    @answers
    async def Tokenize(self, request: Any) -> Any:  # noqa: N802
        special = request.add_special_tokens if request.HasField("add_special_tokens") else None
        chat = request.WhichOneof("kind") == "messages_json"
        prompt = messages_from_json(request.messages_json) if chat else request.text
        options = chat_options_from_json(request.options_json)
        if request.render_only and chat:
            text = await self._rollout.backend.render(prompt, ChatOptions.from_dict(options))
            return pb.TokenizeResponse(text=text)
        ids = await self._rollout.tokenize(prompt, add_special_tokens=special, **options)
        return pb.TokenizeResponse(token_ids=ids)

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        if getattr(request, "all", False):
            given = authorization_of(context.invocation_metadata())
            why = self._tokens.refusal(ABORT_ALL, given)
            if why is not None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)
        return await self._abort(request, context)

    @answers
    async def _abort(self, request: Any) -> Any:
        ids = None if request.all else list(request.request_ids)
        return pb.AbortResponse(count=await self._rollout.abort(ids))

    def _generated(self, request: Any) -> Outputs:
        self._take_word(request.routed, len(request.prompts))
        return self._rollout.stream_many(
            [prompt_from_proto(prompt) for prompt in request.prompts],
            _params(request.params, len(request.prompts)),
            request_ids=[prompt.request_id for prompt in request.prompts],
            stream=request.stream,
        )

    def _chatted(self, request: Any) -> Outputs:
        self._take_word(request.routed, len(request.conversations))
        return self._rollout.stream_chat(
            [messages_from_json(c.messages_json) for c in request.conversations],
            _params(request.params, len(request.conversations)),
            request_ids=[c.request_id for c in request.conversations],
            stream=request.stream,
            delivered=[delivered_from_proto(c) for c in request.conversations],
            **chat_options_from_json(request.options_json),
        )

    def _take_word(self, routed: Any, count: int) -> None:
        """Of a front: its call is for a member of its fleet alone, and others are to hear of it."""
        if len(routed.beginnings) not in (0, count):
            raise InvalidRequest(f"beginnings of {len(routed.beginnings)} prompts, for {count}")
        if (served := self._rollout.backend.served) is not None:
            served.note_routed(routed.fleet, routed.beginnings)


class ControlService:
    def __init__(self, rollout: AsyncRollout) -> None:
        self._rollout = rollout

    @answers
    async def ServerInfo(self, request: Any) -> Any:  # noqa: N802
        return info_to_proto(await self._rollout.server_info())

    @answers
    async def Pause(self, request: Any) -> Any:  # noqa: N802
        await self._rollout.pause_generation(request.mode or "keep", seconds(request))
        return pb.Done()

    @answers
    async def Resume(self, request: Any) -> Any:  # noqa: N802
        await self._rollout.resume_generation()
        return pb.Done()

    @answers
    async def Sleep(self, request: Any) -> Any:  # noqa: N802
        await self._rollout.sleep(request.level, request.mode or "keep", seconds(request))
        return pb.Done()

    @answers
    async def WakeUp(self, request: Any) -> Any:  # noqa: N802
        await self._rollout.wake_up(list(request.tags) or None, seconds(request))
        return pb.Done()

    @answers
    async def ResetPrefixCache(self, request: Any) -> Any:  # noqa: N802
        await self._rollout.reset_prefix_cache(request.reset_running_requests)
        return pb.Done()

    @answers
    async def Stats(self, request: Any) -> Any:  # noqa: N802
        return pb.StatsResponse(json=stats_to_json(await self._rollout.metrics()))


def seconds(request: Any) -> float:
    """The request's timeout; 0, which is also not set, is the default."""
    return DEFAULT_TIMEOUT if request.timeout == 0 else check_timeout(request.timeout)


def _params(messages: Sequence[Any], count: int) -> list[SamplingParams] | SamplingParams | None:
    if not messages:
        return None
    if len(messages) not in (1, count):  # before any is read, which takes 20 us
        raise InvalidRequest(
            f"{len(messages)} sampling parameters for {count} prompts: give 1 or each"
        )
    many = [params_from_proto(message) for message in messages]
    return many[0] if len(many) == 1 else many
