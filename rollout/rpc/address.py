"""Where a service is, as people write it."""

from __future__ import annotations

import re

from rollout.errors import ConfigError

_FORM = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:/@\[\]]+):(\d{1,5})", re.ASCII)


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets, in lower case) and port of "host:port" or "[IPv6]:port".

    Raises ``ConfigError`` for any other form: a scheme, a path, no port, or none of 1..65535.
    """
    found = _FORM.fullmatch(address) if isinstance(address, str) else None
    if found is None or not 1 <= int(found[2]) < 1 << 16:
        schemed = re.match(r"\w+://", address) if isinstance(address, str) else None
        scheme = f"; leave out {schemed[0]} and give the gRPC port, not HTTP's" if schemed else ""
        raise ConfigError(
            f"address {address!r:.300} is not host:port, e.g. 127.0.0.1:50051{scheme}"
        )
    return found[1].strip("[]").lower(), int(found[2])
