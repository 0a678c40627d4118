"""Ports for servers that cannot be told to take any."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """On 127.0.0.1, outside the system's own range: no one who asks for any port, and nobody who
    connects, is given it before it is bound.
    """
    first, last = map(int, RANGE.read_text().split()) if RANGE.exists() else (32768, 60999)
    ports = [*range(10_000, first), *range(last + 1, 65_536)] or [0]
    for _ in range(100):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", secrets.choice(ports)))
            except OSError:
                continue
            return int(tried.getsockname()[1])
    raise AssertionError("100 ports were taken")
