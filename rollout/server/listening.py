"""Sockets that listen, and why there is none where one cannot be had."""

from __future__ import annotations

import errno
import logging
import socket

from rollout.distributed import host_port, is_loopback
from rollout.errors import ConfigError

log = logging.getLogger(__name__)
# An answer may take minutes in which nothing is said: what forgets idle connections (NAT, a
# balancer) sees these probes, and a client whose host is gone is given up after a minute.
_PROBES = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}


def listen(host: str, port: int, what: str) -> socket.socket:
    """A listening TCP socket; ``ConfigError`` says which address is taken, or none of ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit it
        for name, value in _PROBES.items():
            if hasattr(socket, name):  # not everywhere but on Linux
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        sock.bind((host, port))
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        sock.close()
        remedy = "choose another port, or 0 for a free one"
        if isinstance(error, socket.gaierror) or error.args[:1] == (errno.EADDRNOTAVAIL,):
            remedy = "give an address of this machine"
        raise ConfigError(
            f"cannot listen on {host_port(host, port)} for {what}: {error}; {remedy}"
        ) from error
    bound = str(sock.getsockname()[0])
    if is_loopback(bound) and not is_loopback(host):  # Debian has a machine's own name so
        words = "%s, for %s, is %s on this machine, which no other host reaches: give its address"
        log.warning(words, host, what, bound)
    return sock
