"""Of sequences that share most of a prompt one is computed first: which wait for another's."""

from __future__ import annotations

from rollout.engine.scheduling.block_manager import BlockManager, PrefixHit
from rollout.engine.sequences.sequence import Sequence


class InFlightPrefixes:
    """Blocks that running prefills are about to add to the cache, by the next one of each."""

    def __init__(self, blocks: BlockManager, running: list[Sequence]) -> None:
        self._blocks = blocks
        self._by_next: dict[bytes, Sequence] = {}
        # By adapter: what need not be looked up again, to where.
        self._covered: set[tuple[str, tuple[int, ...]]] = set()
        for seq in running:
            self.add(seq)

    def add(self, seq: Sequence) -> None:
        if seq.num_tokens - seq.num_computed <= 1:
            return  # it decodes: its next block is full in many steps
        digest = self._blocks.next_digest(seq)
        if digest is not None:
            self._by_next.setdefault(digest, seq)

    def look_up(self, seq: Sequence) -> PrefixHit | None:
        """What the cache has of ``seq``; None if at least half of the rest is being computed."""
        tokens = (seq.adapter_name, seq.cache_ids(0, seq.cacheable))
        if tokens in self._covered and not seq.block_table:
            return None
        found = self._blocks.find(seq)
        other = self._by_next.get(found.missing)
        if other is None or not self._shares_half(seq, other, len(found.blocks)):
            return found
        self._covered.add(tokens)
        return None

    def _shares_half(self, seq: Sequence, other: Sequence, blocks: int) -> bool:
        """Of what follows ``blocks`` blocks that both have, and may be found."""
        size = self._blocks.block_size
        shared = found = blocks * size
        last = min(seq.cacheable, other.num_tokens)
        while shared + size <= last and seq.cache_ids(shared, shared + size) == other.cache_ids(
            shared, shared + size
        ):
            shared += size
        return 2 * (shared - found) > seq.cacheable - found
