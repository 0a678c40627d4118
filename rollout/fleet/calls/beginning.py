"""What a prompt is known by: digests of its beginnings, of its session and of its group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from rollout.generation import parts_of

CHUNK_TOKENS = 32
CHUNK_BYTES = 64  # about 16 tokens of a text
MAX_CHUNKS = 512  # of one prompt that are looked at
WIDTH = 8  # bytes of a digest


@dataclass(frozen=True, slots=True)
class Beginning:
    """``chain``: a digest of each beginning, one chunk longer each, of which there is one at least.
    ``tokens``: how many a chunk has, about. ``session`` and ``group``: of their names, if any.
    """

    chain: tuple[bytes, ...]
    tokens: int
    session: bytes | None = None
    group: bytes | None = None

    @classmethod
    def of(cls, prompt: Any, session: str | None = None, group: str | None = None) -> Self:
        """``prompt``: token ids, a text, or a conversation."""
        data, size = _bytes_of(prompt)
        digest, found = hashlib.blake2b(digest_size=WIDTH), []
        for start in range(0, max(min(len(data), size * MAX_CHUNKS), 1), size):
            part = data[start : start + size]
            if start and len(part) < size:
                break
            digest.update(part)
            found.append(digest.digest())
        names = _named(session, b"session"), _named(group, b"group")
        return cls(tuple(found), size // 4, *names)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """All digests, the most telling last."""
        return (*self.chain, *(key for key in (self.session, self.group) if key is not None))


def _bytes_of(prompt: Any) -> tuple[bytes, int]:
    prompt, _, _ = parts_of(prompt)
    if isinstance(prompt, str):
        return prompt.encode(errors="surrogatepass"), CHUNK_BYTES
    if prompt and isinstance(prompt[0], Mapping):
        text = "".join(json.dumps(message, sort_keys=True, default=str) for message in prompt)
        return text.encode(errors="surrogatepass"), CHUNK_BYTES
    ids = np.asarray(prompt[: CHUNK_TOKENS * MAX_CHUNKS], dtype=np.int64)
    return ids.astype("<u4").tobytes(), 4 * CHUNK_TOKENS


def _named(name: str | None, kind: bytes) -> bytes | None:
    """Apart from those of prompts."""
    if name is None:
        return None
    text = name.encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=WIDTH, person=kind).digest()
