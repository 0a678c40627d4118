"""What every gRPC call passes before its service: its token, its protocol, the size of messages."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rollout.errors import ConfigError, InvalidRequest
from rollout.rpc.status import status_of
from rollout.server.auth import Tokens, authorization_of
from rollout.wire.version import PROTOCOL_KEY, SOFTWARE_KEY, Speaks, agreed

log = logging.getLogger(__name__)
OURS = "/rollout.v1."
SMALL = 1 << 20  # bytes of a request of the methods that carry neither prompts nor weights
# As large as the server takes.
LARGE = ("Generate", "Chat", "Multiplex", "Tokenize", "Update", "UpdateWeights")


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends a call without the right token as UNAUTHENTICATED; its request is never received."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        given = authorization_of(details.invocation_metadata)
        if handler is None:
            return None
        why = self._tokens.refusal(details.method, given)
        return handler if why is None else refusing(grpc.StatusCode.UNAUTHENTICATED, why)


class ProtocolInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends a call of a client that speaks no version of the protocol that we do, and logs it.

    Clients that say nothing are let through: health probes, reflection, other people's stubs.
    """

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        metadata = dict(details.invocation_metadata or ())
        if handler is None or PROTOCOL_KEY not in metadata:
            return handler
        software = str(metadata.get(SOFTWARE_KEY, ""))
        try:
            agreed(Speaks.read(str(metadata[PROTOCOL_KEY]), software), "the client")
        except ConfigError as error:
            log.warning("refused %s: %s", details.method, error)
            return refusing(*status_of(error))
        return handler


class MessageInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Requests of our services that are too long for their method, or no message, become errors.

    The service finds an ``InvalidRequest`` in the message's place, and raises it.
    """

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(OURS):
            return handler
        name = details.method.rpartition("/")[2]
        parse = bounded(handler.request_deserializer, None if name in LARGE else SMALL)
        return handler._replace(request_deserializer=parse)


def bounded(parse: Callable[[bytes], Any], limit: int | None) -> Callable[[bytes], Any]:
    """``parse`` that returns an ``InvalidRequest`` where it would raise, or read too much."""

    def read(data: bytes) -> Any:
        if limit is not None and len(data) > limit:
            return InvalidRequest(f"the request has {len(data)} bytes; at most {limit} are read")
        try:
            return parse(data)
        except DecodeError:
            return InvalidRequest("the request is not a message of this method")

    return read


def refusing(*status: Any) -> Any:
    """A handler that refuses with this code, these details and this trailing metadata.

    It answers every kind of call. Taken for one whose requests stream, it reads none of them: what
    the caller sends stays in the connection's window.
    """

    async def refuse(requests: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(*status)
        yield

    return grpc.stream_stream_rpc_method_handler(refuse)
