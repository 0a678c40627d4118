"""Which member a prompt goes to: where its beginning has been, unless that one has too much to do.

Prefix affinity with bounded loads: the member that got the longest known beginning of this prompt;
for one that is new, rendezvous hashing (Thaler and Ravishankar, 1998) of its first chunk, so that
several fronts agree without talking. A member whose load is above ``SPREAD`` times the mean (after
Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018) is passed over
for the one with the least, but where that would cost more than it saves: what is known would be
computed again there, so that each new token waits for half as many calls as the two are apart by.

A request of a session goes where the last one of it went; a session that is new, by a hash of its
name. Where that member has too much to do, the next one in the order of the same hash takes it.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout.generation import AnyPrompt, parts_of
from rollout.weight_sync.protocol.membership import Standing

CHUNK_TOKENS = 32
CHUNK_BYTES = 64  # about 16 tokens of a text
MAX_CHUNKS = 512  # of one prompt that are looked at
KNOWN = 1 << 16  # chunks that are remembered
SPREAD = 1.125
NEW_TOKENS = 256  # of a prompt that does not say how many it wants
FEWEST = 16  # that are reckoned with: where a prompt is all, others' prompts are waited for
FULL = 0.8  # of a KV cache, from which on what is sent there counts for more, at last twice


def load_of(calls: int, standing: Standing) -> float:
    """Of a member with so many calls of this front: with them what waits there, also for other
    fronts; more where its KV cache is nearly full, as what runs there may be preempted for it.
    """
    pressure = max(0.0, standing.kv_usage - FULL) / (1 - FULL)
    return (calls + standing.waiting) * (1 + pressure)


class Router:
    """Thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = self.misses = 0  # chunks of prompts that went where they were known, or not

    def choose(
        self,
        prompt: Any,
        loads: Mapping[str, float],
        extra: float = 1.0,
        new_tokens: int | None = None,
        session: str | None = None,
    ) -> str:
        """One of the members that ``loads`` names, of which there must be some; see ``load_of``.

        ``prompt``: token ids, a text, or a conversation. ``extra``: the load that it brings.
        ``new_tokens``: the most that it asks for. ``session``: the name of what it belongs to.
        """
        chain, tokens = _chunks(prompt)
        bound = SPREAD * (sum(loads.values()) + extra) / len(loads)
        new = max(NEW_TOKENS if new_tokens is None else new_tokens, FEWEST)
        key = chain[0] if session is None else _digest(session)
        with self._lock:
            known, depth = self._longest(chain, loads)
            found = known if session is None else self._known.get(key)
            if found is None or found not in loads:
                found = max(loads, key=lambda name: _weight(key, name))
            depth = depth if found == known else 0
            if loads[found] + extra > max(bound, extra):
                other = min(loads, key=lambda name: (loads[name], name != found, name))
                if session is not None:
                    free = [name for name in loads if loads[name] + extra <= bound]
                    other = max(free or [other], key=lambda name: _weight(key, name))
                if (loads[found] - loads[other]) / 2 * new > depth * tokens:
                    found, depth = other, 0
            self.hits += depth
            self.misses += len(chain) - depth
            for chunk in chain if session is None else [*chain, key]:
                self._known[chunk] = found
                self._known.move_to_end(chunk)
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return found

    def forget(self, member: str) -> None:
        """Its caches are gone."""
        with self._lock:
            self._known = OrderedDict((c, m) for c, m in self._known.items() if m != member)

    def _longest(
        self, chain: Sequence[bytes], loads: Mapping[str, float]
    ) -> tuple[str | None, int]:
        for depth in range(len(chain), 0, -1):
            member = self._known.get(chain[depth - 1])
            if member is not None and member in loads:
                return member, depth
        return None, 0


def _chunks(prompt: AnyPrompt | Sequence[Mapping[str, Any]]) -> tuple[list[bytes], int]:
    """A digest of each beginning of the prompt, one chunk longer each, of which there is one at
    least; how many tokens a chunk has, about.
    """
    data, size = _bytes_of(prompt)
    digest, found = hashlib.blake2b(digest_size=16), []
    for start in range(0, max(min(len(data), size * MAX_CHUNKS), 1), size):
        part = data[start : start + size]
        if start and len(part) < size:
            break
        digest.update(part)
        found.append(digest.digest())
    return found, size // 4


def _bytes_of(prompt: Any) -> tuple[bytes, int]:
    prompt, _, _ = parts_of(prompt)
    if isinstance(prompt, str):
        return prompt.encode(errors="surrogatepass"), CHUNK_BYTES
    if prompt and isinstance(prompt[0], Mapping):
        text = "".join(json.dumps(message, sort_keys=True, default=str) for message in prompt)
        return text.encode(errors="surrogatepass"), CHUNK_BYTES
    ids = np.asarray(prompt[: CHUNK_TOKENS * MAX_CHUNKS], dtype=np.int64)
    return ids.astype("<u4").tobytes(), 4 * CHUNK_TOKENS


def _digest(session: str) -> bytes:
    """Apart from those of prompts."""
    name = session.encode(errors="surrogatepass")
    return hashlib.blake2b(name, digest_size=16, person=b"session").digest()


def _weight(chunk: bytes, member: str) -> bytes:
    return hashlib.blake2b(member.encode(), key=chunk, digest_size=8).digest()
