"""Reads headers of buckets, and what is the same in every update once."""

from __future__ import annotations

from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader
from rollout.wire.repeated import field_texts, from_texts

MAX_KEPT = 64 << 20  # bytes of text


class HeaderReader:
    """``read`` makes a header of its JSON text.

    Where tensors are read in place, the next update's entries are mostly the text that they were,
    of hundreds of tensors: they are then the same object, and neither parsed nor checked again.
    Threads may share it.
    """

    def __init__(self) -> None:
        self._last: dict[bytes, tuple[bytes, tuple[BucketEntry, ...]]] = {}  # by index

    def read(self, text: bytes) -> BucketHeader:
        """Raises ``TransferFailed`` where the text is no header."""
        texts = field_texts(text, "BucketHeader")
        index, entries = texts.get("index", b""), texts.get("entries", b"")
        last = self._last.get(index)
        if last is not None and last[0] == entries:
            return from_texts(BucketHeader, texts, {"entries": last[1]})
        header = from_texts(BucketHeader, texts, {})
        if header.is_in_place:
            kept = sum(len(one) for one, _ in list(self._last.values()))
            if kept + len(entries) > MAX_KEPT:  # more than a trainer's, or another one's
                self._last = {}
            self._last[index] = entries, header.entries
        return header
