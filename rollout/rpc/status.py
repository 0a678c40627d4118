"""How errors and limits look on gRPC: the status, its metadata and the channel options."""

from __future__ import annotations

import json
from typing import Any

import grpc

from rollout.errors import (
    STATUS,
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    EngineOverloaded,
    InvalidRequest,
    RequestAborted,
    RolloutError,
    from_wire,
    to_wire,
)

ERROR_KEY = "rollout-error-bin"
MAX_MESSAGE = 256 << 20  # bytes of one answer
MAX_BODY = 64 << 20  # bytes of one request, if the server was told no other limit
CHUNK = 2 << 20  # bytes of weights per message: the fastest size on loopback
MAX_PENDING = 1 << 16  # calls that have come and wait to be looked at
MAX_ERROR_TEXT = 4 << 10  # bytes of message in the trailing metadata, whose default limit is 8 KiB

# A host that is gone, or a process that is stopped, is noticed without traffic after the sum of
# both; gRPC itself waits for a minute where the last is not said, too.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Also between calls: what forgets idle connections (NAT, a balancer) does so without a word,
    # and a trainer that comes back after a long step would be the first to notice.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
)
CHANNEL_OPTIONS = (
    *_KEEPALIVE,
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one client's back-off is not another's
    ("grpc.initial_reconnect_backoff_ms", 100),  # a stream that was cut goes on at once
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
SERVER_OPTIONS = (
    *_KEEPALIVE,
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.so_reuseport", 0),  # a busy port is an error, not a share of its traffic
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # By default some of more than 1000 end as CANCELLED; the queue behind says what is too much.
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
)


_NO_TLS = "TLS could not be agreed on"
# What is within gRPC's words, which differ from release to release -> plain ones.
_REASONS = (
    ("refused", "nothing listens there"),
    ("domain name not found", "this host name is not known"),
    ("resolv", "this host name cannot be looked up"),
    ("dns", "this host name cannot be looked up"),
    ("parsing http/2", "what listens there does not speak gRPC (is it the HTTP port?)"),
    ("http1", "what listens there does not speak gRPC (is it the HTTP port?)"),
    ("handshake", _NO_TLS),
    ("unreachable", "there is no way to this host"),
    ("no route", "there is no way to this host"),
    ("time", "nothing came back in time"),
    ("goaway", "it has ended, or is about to"),
    ("reset by peer", "the connection was cut: it has ended, or something between cut it"),
    ("socket closed", "the connection was cut: it has ended, or something between cut it"),
    ("broken pipe", "the connection was cut: it has ended, or something between cut it"),
)


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Code, details and trailing metadata that carry ``error`` to a client."""
    wire = to_wire(error)
    text = wire["message"].encode()
    if len(text) > MAX_ERROR_TEXT:
        wire["message"] = text[:MAX_ERROR_TEXT].decode(errors="ignore") + " ... (cut)"
    known = next((cls for cls in type(error).__mro__ if cls in STATUS), EngineError)
    code = getattr(grpc.StatusCode, STATUS[known][0])
    # Details travel beside the metadata and under the same limit: a first line is enough there.
    data = json.dumps(wire, ensure_ascii=False).encode()
    return code, wire["message"][:256], ((ERROR_KEY, data),)


def reason(details: str | None) -> str:
    """In plain words what gRPC says of a connection that failed; its own are in ``__cause__``."""
    said = (details or "").lower()
    return next(
        (words for key, words in _REASONS if key in said), "the connection to it failed or broke"
    )


def is_typed(error: Any) -> bool:
    """Whether a server of ours wrote this error."""
    return any(key == ERROR_KEY for key, _ in error.trailing_metadata() or ())


def error_from_rpc(error: Any, address: str) -> RolloutError:
    """The error a failed call stands for; by its code where no server of ours wrote it."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_KEY:
            return from_wire(json.loads(value))
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.UNAVAILABLE:
        why = reason(details)
        if why == _NO_TLS:
            return EngineClosed(
                f"the rollout service at {address} does not answer: {why}; check --tls-ca, "
                "--tls-cert and --tls-key, on both sides"
            )
        return EngineClosed(
            f"the rollout service at {address} does not answer: {why}; start it with "
            "`rollout serve MODEL --grpc-port PORT`, or check the address it printed as grpc= (a "
            "fleet's front listens once enough engines serve, and its log says which do not)"
        )
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return ConfigError(
            f"the service at {address} lets nobody in without its token: {details}; commands take "
            "--token or ROLLOUT_TOKEN"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(
            f"no answer from {address} in time: it is busy, cannot be reached, or is no rollout "
            "service; ask it with `rollout info`, give a longer timeout, or check the address"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ConfigError(
            f"{address} does not know this call ({details}): it is no rollout service, or one of "
            "another version; check the address it printed as grpc="
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if "larger than max" not in (details or ""):
            return EngineOverloaded(f"{address}: {details}")
        return InvalidRequest(
            f"{address}: a message of this call is too large ({details}): make several calls of "
            "it, or smaller images; what a service takes of one request is its --max-body-bytes"
        )
    kinds: dict[Any, type[RolloutError]] = {
        grpc.StatusCode.CANCELLED: RequestAborted,
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    }
    return kinds.get(code, EngineError)(f"{address}: {code.name}: {details}")
