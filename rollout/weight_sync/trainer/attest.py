"""Digests of a gathered source, taken by every rank of its own boxes and not of what was gathered.

So a gather that puts a shard in the wrong place is found by the engine, and not proven equal.
"""

from __future__ import annotations

from rollout.errors import SourceFailed
from rollout.weight_sync.protocol.digests import total
from rollout.weight_sync.trainer.bucket_sender import Books
from rollout.weight_sync.trainer.lockstep import Watchdog
from rollout.weight_sync.trainer.rank_group import Agreement
from rollout.weight_sync.trainer.reshard_plan import held
from rollout.weight_sync.trainer.sources.base import LocalSource
from rollout.weight_sync.trainer.survey import Survey
from rollout.weights import Box


class OwnDigests:
    """One rank's part; a box that several ranks hold is counted by the first of them."""

    def __init__(
        self, source: LocalSource, survey: Survey, rank: int, books: Books, watch: Watchdog
    ) -> None:
        self._source, self._books, self._watch = source, books, watch
        self._metadata = {meta.name: meta for meta in survey.metadata}
        self._mine: dict[str, set[Box]] = {
            name: {box for box, ranks in held(name, survey.have).items() if ranks[0] == rank}
            for name in self._metadata
        }

    def take(self, name: str) -> None:
        """Digest this rank's boxes of a tensor that has just been gathered; local."""
        mine = self._mine.get(name)
        if not mine:
            return
        meta = self._metadata[name]
        with self._watch.over(f"read {name}"):
            found = self._source.local_values(name)
        for box, values in found:
            if box in mine:
                if tuple(values.shape) != box.shape or values.dtype != meta.dtype:
                    raise SourceFailed(f"{name}: the source no longer holds {box}")
                mine.discard(box)
                self._books.digest(name, values, meta.shape, box)
        if mine:
            raise SourceFailed(f"{name}: the source no longer holds {', '.join(map(str, mine))}")

    def sum_up(self, agreement: Agreement, timeout: float) -> None:
        """Collective: every rank's books then have the digests of the whole tensors."""
        said = agreement.exchange({"digests": self._books.digests}, timeout, "digests")
        digests = dict.fromkeys(self._metadata, 0)
        for reply in said:
            for name, value in reply["digests"].items():
                digests[name] = total([digests[name], value])
        self._books.digests, self._books.of_own_boxes = digests, True
