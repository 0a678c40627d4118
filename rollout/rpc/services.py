"""The gRPC services of ``proto/rollout.proto``: stubs and handlers, made from its descriptor."""

from __future__ import annotations

from typing import Any, ClassVar

import grpc
from google.protobuf.message_factory import GetMessageClass

from rollout.rpc import rollout_pb2 as pb

SERVICES: Any = pb.DESCRIPTOR.services_by_name
_KINDS = {  # (the client streams, the server streams)
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


class Stub:
    """One attribute per method of ``service``, on a ``grpc.Channel`` or a ``grpc.aio.Channel``;
    each is made when it is first asked for.
    """

    service: ClassVar[str]

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        described = SERVICES[self.service]
        method = described.methods_by_name.get(name)
        if method is None:
            raise AttributeError(f"{self.service} has no method {name!r}")
        call = getattr(self._channel, _kind(method))(
            f"/{described.full_name}/{name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        setattr(self, name, call)
        return call


class GenerationStub(Stub):
    service = "Generation"


class WeightSyncStub(Stub):
    service = "WeightSync"


class ControlStub(Stub):
    service = "Control"


def add_service(server: Any, service: str, servicer: Any, **handlers: Any) -> None:
    """Serve the methods of ``service`` that ``servicer`` has; others are UNIMPLEMENTED.

    ``handlers``: of methods whose messages are read or written in another way.
    """
    for method in SERVICES[service].methods:
        if method.name not in handlers and hasattr(servicer, method.name):
            handlers[method.name] = getattr(grpc, f"{_kind(method)}_rpc_method_handler")(
                getattr(servicer, method.name),
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
    full_name = SERVICES[service].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(full_name, handlers),))


def _kind(method: Any) -> str:
    return _KINDS[method.client_streaming, method.server_streaming]
