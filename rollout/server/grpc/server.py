"""The gRPC server over an ``AsyncRollout``: Generation, WeightSync, Control, health, reflection."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollout.distributed import host_port, is_loopback
from rollout.errors import ConfigError
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.chunks import command_from_wire
from rollout.rpc.forks import FORKS
from rollout.rpc.services import SERVICES, add_service
from rollout.rpc.status import CHUNK, MAX_BODY, SERVER_OPTIONS
from rollout.rpc.tls import ServerTls
from rollout.server.auth import Tokens
from rollout.server.grpc.health import HealthService
from rollout.server.grpc.interceptors import (
    MessageInterceptor,
    ProtocolInterceptor,
    TokenInterceptor,
)
from rollout.server.grpc.services import ControlService, GenerationService
from rollout.server.grpc.weights import WeightSyncService
from rollout.server.listening import listen

if TYPE_CHECKING:
    from rollout.api import AsyncRollout

log = logging.getLogger(__name__)
STOP_GRACE = 1.0  # seconds that calls under way may take to end


class GrpcServer:
    """A running server; ``address`` is what clients connect to."""

    def __init__(
        self, server: Any, health: HealthService, weights: WeightSyncService, host: str, port: int
    ) -> None:
        self._server, self._health, self._weights = server, health, weights
        self.port = port
        self.address = host_port(host, port)

    async def stop(self, grace: float = STOP_GRACE) -> None:
        """Refuse new calls, end those under way within ``grace`` seconds. Idempotent.

        Updates that have not ended by half of it are told that there is no engine any more.
        """
        self._health.stop()
        stopping = asyncio.ensure_future(self._server.stop(grace))
        await asyncio.wait([stopping], timeout=grace / 2)
        self._weights.shut_down()
        await stopping
        FORKS.open.discard(self._server)
        self._weights.close()


async def serve(
    rollout: AsyncRollout,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | None = None,
    control_token: str | None = None,
    tls: ServerTls | None = None,
    insecure: bool = False,
    max_body_bytes: int = MAX_BODY,
) -> GrpcServer:
    """Start serving in the running loop; port 0 picks a free one.

    ``token`` allows sampling, ``control_token`` (default: the same) weights and control too.
    ``tls`` encrypts; with its ``client_ca`` only clients that have a certificate are let in.
    ``max_body_bytes``: of one message that is taken, 2 GiB at most. Raises ``ConfigError`` for a
    busy port, and for a host beyond loopback without a token, or without ``tls`` unless
    ``insecure`` allows it.
    """
    tokens = Tokens(generation=token, control=control_token)
    if not isinstance(tls, ServerTls | None):
        raise ConfigError(f"tls must be a ServerTls(cert=..., key=...), or None, got {tls!r:.80}")
    if not isinstance(insecure, bool):
        raise ConfigError(f"insecure must be True or False, got {insecure!r:.80}")
    if type(max_body_bytes) is not int or max_body_bytes < 1:
        raise ConfigError(f"max_body_bytes must be 1 or more, got {max_body_bytes!r:.80}")
    tokens.check_host(host, tls=tls is not None, insecure=insecure)
    # A message of weights is a chunk; gRPC counts in 32 bits.
    largest = min(max(max_body_bytes, 2 * CHUNK), (1 << 31) - 1)
    FORKS.check()
    server = grpc.aio.server(
        interceptors=[TokenInterceptor(tokens), ProtocolInterceptor(), MessageInterceptor()],
        options=(*SERVER_OPTIONS, ("grpc.max_receive_message_length", largest)),
    )
    weights, health = WeightSyncService(rollout, tls), HealthService(rollout)
    add_service(server, "Generation", GenerationService(rollout, tokens))
    add_service(server, "Control", ControlService(rollout))
    _add_weights(server, weights)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    services = [service.full_name for service in SERVICES.values()]
    reflection.enable_server_reflection(
        [*services, "grpc.health.v1.Health", reflection.SERVICE_NAME], server
    )
    bound = _bind(server, host, port, None if tls is None else tls.credentials())
    if tls is None and not is_loopback(host):
        log.warning("tokens, prompts and weights cross the network in clear on %s: no TLS", host)
    await server.start()
    FORKS.open.add(server)
    if (served := rollout.backend.served) is not None:
        served.counters.is_served = True
    return GrpcServer(server, health, weights, host, bound)


def _add_weights(server: Any, weights: WeightSyncService) -> None:
    # The message class would copy the bytes of weights twice.
    update = grpc.stream_stream_rpc_method_handler(
        weights.Update, command_from_wire, pb.UpdateEvent.SerializeToString
    )
    add_service(server, "WeightSync", weights, Update=update)


def _bind(server: Any, host: str, port: int, credentials: Any) -> int:
    target = host_port(host, port)
    try:
        if credentials is None:
            bound = int(server.add_insecure_port(target))
        else:
            bound = int(server.add_secure_port(target, credentials))
    except RuntimeError as error:
        raise _unbound(host, port, error) from error
    if bound == 0:
        raise _unbound(host, port, "the address is in use")
    return bound


def _unbound(host: str, port: int, said: object) -> ConfigError:
    """Why gRPC cannot listen there, which it does not say itself."""
    try:
        listen(host, port, "gRPC").close()
    except ConfigError as error:
        return error
    return ConfigError(f"cannot listen on {host_port(host, port)} for gRPC: {said}")
