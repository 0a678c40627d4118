"""Whether an address is that of an HTTP server: the port that is mistaken for gRPC's."""

from __future__ import annotations

import http.client

from rollout.rpc.address import split_address
from rollout.rpc.tls import ClientTls, client_context

GRPC_PORT = "X-Rollout-Grpc-Port"  # header of our servers' /health, once they serve gRPC


def http_problem(address: str, tls: ClientTls | None, timeout: float = 2.0) -> str | None:
    """What is wrong with "host:port" for a gRPC client where HTTP is spoken there; None: it is not.

    Blocks, for a few times ``timeout`` seconds at most.
    """
    host, port = split_address(address)
    if tls is None:
        asked = http.client.HTTPConnection(host, port, timeout=timeout)
    else:
        context = client_context(tls, "http/1.1")
        asked = http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
    try:
        asked.request("GET", "/health")
        found = asked.getresponse().headers.get(GRPC_PORT, "")
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        asked.close()
    if found.isdecimal():
        return f"it is an HTTP port; the gRPC port of this service is {found[:5]}"
    return "it is an HTTP port; give the gRPC port, which `rollout serve` prints as grpc="
