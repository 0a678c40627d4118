"""What a chain of prefix-cache blocks starts from: whose KV it is."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoot:
    """The weights that compute a block's KV: blocks of different roots never match.

    ``version``: of the base weights. ``adapter``: the adapter and its version, "" for the base
    alone. ``instance``: which of the model's instances steps, 0 for the live one.
    """

    version: int
    adapter: str = ""
    instance: int = 0

    def digest(self, salt: int, chain: int, size: int) -> bytes:
        """``size`` bytes; ``salt`` and ``chain`` keep engines apart, and what was reset."""
        hashed = blake2b(digest_size=size)
        for field in (salt, chain, self.version, self.instance, self.adapter):
            hashed.update(f"{field}\0".encode())
        return hashed.digest()
