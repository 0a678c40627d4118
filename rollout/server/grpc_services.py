"""The gRPC services of generation and control, and what all services share: errors, tokens."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from rollout import rollout_pb2 as pb
from rollout.config import DEFAULT_TIMEOUT, check_timeout
from rollout.errors import ConfigError, InvalidRequest, RolloutError
from rollout.generation import SamplingParams
from rollout.grpc_status import status_of
from rollout.proto_convert import (
    info_to_proto,
    messages_from_json,
    output_to_proto,
    params_from_proto,
    prompt_from_proto,
    stats_to_json,
)
from rollout.rollout_pb2_grpc import ControlServicer, GenerationServicer
from rollout.server.auth import Tokens, authorization_of
from rollout.server_info import PROTOCOL, PROTOCOL_KEY, protocol_problem

if TYPE_CHECKING:
    from rollout.api import AsyncRollout

log = logging.getLogger(__name__)
S = TypeVar("S")
T = TypeVar("T")


async def abort_with(context: Any, error: Exception) -> None:
    """End the call with the status of ``error``; one from outside the tree is logged here."""
    if not isinstance(error, RolloutError):
        log.error("a call failed", exc_info=error)
    await context.abort(*status_of(error))


def answers(
    method: Callable[[S, Any], Awaitable[T]],
) -> Callable[[S, Any, Any], Awaitable[T]]:
    """A unary method whose errors become statuses."""

    @wraps(method)
    async def call(self: S, request: Any, context: Any) -> T:
        try:
            return await method(self, request)
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
        items: Any = method(self, request)
        try:
            async for item in items:
                yield item
        except Exception as error:  # noqa: BLE001 - the edge of the process
            await abort_with(context, error)
        finally:
            await items.aclose()  # a client that left: its requests are aborted now

    return call


class GenerationService(GenerationServicer):  # type: ignore[misc]
    def __init__(self, rollout: AsyncRollout) -> None:
        self._rollout = rollout

    @streams
    async def Generate(self, request: Any) -> AsyncIterator[Any]:  # noqa: N802
        outputs = self._rollout.stream_many(
            [prompt_from_proto(prompt) for prompt in request.prompts],
            _params(request.params, len(request.prompts)),
            request_ids=[prompt.request_id for prompt in request.prompts],
            stream=request.stream,
        )
        async for index, output in outputs:
            yield pb.GenerateResponse(index=index, output=output_to_proto(output))

    @streams
    async def Chat(self, request: Any) -> AsyncIterator[Any]:  # noqa: N802
        outputs = self._rollout.stream_chat(
            [messages_from_json(c.messages_json) for c in request.conversations],
            _params(request.params, len(request.conversations)),
            request_ids=[c.request_id for c in request.conversations],
            stream=request.stream,
        )
        async for index, output in outputs:
            yield pb.GenerateResponse(index=index, output=output_to_proto(output))

    @answers
    async def Tokenize(self, request: Any) -> Any:  # noqa: N802
        special = request.add_special_tokens if request.HasField("add_special_tokens") else None
        chat = request.WhichOneof("kind") == "messages_json"
        prompt = messages_from_json(request.messages_json) if chat else request.text
        ids = await self._rollout.tokenize(prompt, add_special_tokens=special)
        return pb.TokenizeResponse(token_ids=ids)

    @answers
    async def Abort(self, request: Any) -> Any:  # noqa: N802
        ids = None if request.all else list(request.request_ids)
        return pb.AbortResponse(count=await self._rollout.abort(ids))


class ControlService(ControlServicer):  # type: ignore[misc]
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
        await self._rollout.sleep(request.level, seconds(request))
        return pb.Done()

    @answers
    async def WakeUp(self, request: Any) -> Any:  # noqa: N802
        await self._rollout.wake_up(list(request.tags) or None, seconds(request))
        return pb.Done()

    @answers
    async def ResetPrefixCache(self, request: Any) -> Any:  # noqa: N802
        await self._rollout.reset_prefix_cache()
        return pb.Done()

    @answers
    async def Stats(self, request: Any) -> Any:  # noqa: N802
        return pb.StatsResponse(json=stats_to_json(await self._rollout.metrics()))


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends a call without the right token as UNAUTHENTICATED, before its request is read."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        given = authorization_of(details.invocation_metadata)
        if handler is None or self._tokens.allows(details.method, given):
            return handler
        text = f"{details.method} needs a token: pass token=..., as the server was started with one"
        return _refusing(handler, grpc.StatusCode.UNAUTHENTICATED, text)


class ProtocolInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends a call of a client that says it speaks another protocol, and logs that one came.

    Clients that say nothing are let through: health probes, reflection, other people's stubs.
    """

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        given = dict(details.invocation_metadata or ()).get(PROTOCOL_KEY, PROTOCOL)
        problem = protocol_problem(given, "the client")
        if handler is None or problem is None:
            return handler
        log.warning("refused %s: %s", details.method, problem)
        return _refusing(handler, *status_of(ConfigError(problem)))


def seconds(request: Any) -> float:
    """The request's timeout; 0, which is also not set, is the default."""
    return DEFAULT_TIMEOUT if request.timeout == 0 else check_timeout(request.timeout)


def _params(messages: Sequence[Any], count: int) -> list[SamplingParams] | SamplingParams | None:
    if not messages:
        return None
    many = [params_from_proto(message) for message in messages]
    if len(many) not in (1, count):
        raise InvalidRequest(f"{len(many)} sampling parameters for {count} prompts: give 1 or each")
    return many[0] if len(many) == 1 else many


def _refusing(handler: Any, *status: Any) -> Any:
    """A handler of the same kind that refuses: code, details and trailing metadata."""

    async def unary(request: Any, context: Any) -> None:
        await context.abort(*status)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(*status)
        yield

    makers = {
        (False, False): (grpc.unary_unary_rpc_method_handler, unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, stream),
    }
    make, refuse = makers[handler.request_streaming, handler.response_streaming]
    return make(refuse, handler.request_deserializer, handler.response_serializer)
