"""Which member a prompt goes to: where its beginning has been, unless that one has too much to do.

Prefix affinity with bounded loads: the member that got the longest known beginning of this prompt;
for one that is new, rendezvous hashing (Thaler and Ravishankar, 1998) of its first chunk, so that
several fronts agree without talking. A member whose load is above ``SPREAD`` times the mean (after
Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018) is passed over
for the one with the least, but where that would cost more than it saves: what is known would be
computed again there, so that each new token waits for half as many calls as the two are apart by.

A request of a session goes where the last one of it went; a session that is new, by a hash of its
name. Where that member has too much to do, the next one in the order of the same hash takes it.
What else comes of a group goes where the first of it went, which can then pin it whole.

Where others sent what a front did not see, members report (``reports.py``).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from rollout.fleet.calls.beginning import Beginning
from rollout.weight_sync.protocol.membership import Standing

KNOWN = 1 << 17  # digests that are remembered
SPREAD = 1.125
NEW_TOKENS = 256  # of a prompt that does not say how many it wants
FEWEST = 16  # that are reckoned with: where a prompt is all, others' prompts are waited for
FULL = 0.8  # of a KV cache, from which on what is sent there counts for more, at last twice


def load_of(calls: int, standing: Standing) -> float:
    """Of a member with so many calls, of all fronts: with them what waits there; more where its KV
    cache is nearly full, as what runs there may be preempted for it.
    """
    pressure = max(0.0, standing.kv_usage - FULL) / (1 - FULL)
    return (calls + standing.waiting) * (1 + pressure)


class Router:
    """Thread-safe."""

    def __init__(self) -> None:
        # By digest: the member that had it last, and when, by ``time.monotonic``.
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._lock = threading.Lock()

    def place(
        self,
        beginning: Beginning,
        loads: Mapping[str, float],
        extra: float = 1.0,
        new_tokens: int | None = None,
    ) -> str:
        """One of the members that ``loads`` names, of which there must be some; see ``load_of``.

        ``extra``: the load that the prompt brings. ``new_tokens``: the most that it asks for.
        """
        bound = SPREAD * (sum(loads.values()) + extra) / len(loads)
        new = max(NEW_TOKENS if new_tokens is None else new_tokens, FEWEST)
        key = beginning.chain[0] if beginning.session is None else beginning.session
        with self._lock:
            known, depth = self._longest(beginning.chain, loads)
            together = self._member(beginning.group, loads)
            found = known if beginning.session is None else self._member(beginning.session, loads)
            found = together or found or max(loads, key=lambda name: _weight(key, name))
            depth = depth if found == known else 0
            if loads[found] + extra > max(bound, extra) and together is None:
                other = min(loads, key=lambda name: (loads[name], name != found, name))
                if beginning.session is not None:
                    free = [name for name in loads if loads[name] + extra <= bound]
                    other = max(free or [other], key=lambda name: _weight(key, name))
                if (loads[found] - loads[other]) / 2 * new > depth * beginning.tokens:
                    found, depth = other, 0
            self._note(found, ((key, time.monotonic()) for key in beginning.keys))
        return found

    def learn(self, member: str, had: Iterable[tuple[bytes, float]]) -> None:
        """What a member reports: digests, each with when it had it. The newest word counts: what
        went elsewhere since stays there.
        """
        with self._lock:
            self._note(member, had)

    def forget(self, member: str) -> None:
        """Its caches are gone."""
        with self._lock:
            self._known = OrderedDict((c, m) for c, m in self._known.items() if m[0] != member)

    def _note(self, member: str, had: Iterable[tuple[bytes, float]]) -> None:
        for digest, when in had:
            before = self._known.get(digest)
            if before is None or before[1] <= when:
                self._known[digest] = member, when
                self._known.move_to_end(digest)
        while len(self._known) > KNOWN:
            self._known.popitem(last=False)

    def _member(self, digest: bytes | None, loads: Mapping[str, float]) -> str | None:
        found = None if digest is None else self._known.get(digest)
        return found[0] if found is not None and found[0] in loads else None

    def _longest(
        self, chain: Sequence[bytes], loads: Mapping[str, float]
    ) -> tuple[str | None, int]:
        for depth in range(len(chain), 0, -1):
            if (member := self._member(chain[depth - 1], loads)) is not None:
                return member, depth
        return None, 0


def _weight(chunk: bytes, member: str) -> bytes:
    return hashlib.blake2b(member.encode(), key=chunk, digest_size=8).digest()
