"""Reads headers of buckets, and what is the same in every update once."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from rollout.errors import TransferFailed
from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader
from rollout.wire.codec import from_plain, parsed

MAX_KEPT = 64 << 20  # bytes of text
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


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
        try:
            found = {name: bytes(raw) for name, raw in _fields.decode(text).items()}
        except (ValueError, RecursionError) as error:
            raise TransferFailed(f"malformed BucketHeader: {error}") from error
        index, entries = found.get("index", b""), found.get("entries", b"")
        last = self._last.get(index)
        if last is not None and last[0] == entries:
            plain = {name: parsed(raw) for name, raw in found.items() if name != "entries"}
            return replace(from_plain(BucketHeader, {**plain, "entries": []}), entries=last[1])
        header = from_plain(BucketHeader, parsed(text))
        if header.is_in_place:
            kept = sum(len(one) for one, _ in list(self._last.values()))
            if kept + len(entries) > MAX_KEPT:  # more than a trainer's, or another one's
                self._last = {}
            self._last[index] = entries, header.entries
        return header
