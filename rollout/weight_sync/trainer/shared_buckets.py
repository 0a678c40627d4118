"""Trainer ranks of one host write each bucket together, in memory that the engine's ranks map."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader
from rollout.weight_sync.trainer.bucket_sender import BucketSender
from rollout.weight_sync.trainer.reshard import BoxRounds
from rollout.weight_sync.transports.shared_memory import SharedFile, SharedWriter
from rollout.wire.codec import from_plain


class SharedBuckets(BoxRounds):
    """Collective over the source's ranks: nothing is gathered, each byte is copied once.

    By the vote of bucket i all of it is written, and bucket i - 1 has been taken by every engine
    rank, so that its half is free; then the first rank announces it, as if it had packed it alone.
    """

    _written = 0  # bytes

    def run(self, rounds: tuple[BucketHeader, ...], meet: Mapping[str, Any]) -> None:
        """Write everything; returns when it has been taken and all boxes are digested."""
        with ExitStack() as stack:
            memory: BucketSender | SharedWriter | None = self._first
            if memory is None:
                writer = SharedWriter(from_plain(SharedFile, meet["offer"]))
                memory = stack.enter_context(closing(writer))
            self.together("connect", memory.connect)
            for header in rounds:
                half = memory.buffers[header.index % 2]
                self.together(f"bucket {header.index}", partial(self._write, header, half))
                if self._first is not None:
                    told = replace(header, messages=())
                    self._first.announce(told, half[: header.nbytes])
            self.together("last buckets", self.flush)
            self.together("digests", self.digest_rest)
            self._stats.wire_bytes = self._written

    def _write(self, header: BucketHeader, into: Tensor) -> None:
        """This rank's boxes of a bucket, each where the announcement says."""
        started = time.perf_counter()
        wanted: dict[str, list[tuple[BucketEntry, int]]] = {}
        for message in header.messages:
            if message.src == self._group.rank:
                self._written += message.nbytes
                for entry in message.entries:
                    wanted.setdefault(entry.name, []).append((entry, entry.offset))
        self.write(wanted, into)
        self._stats.gather_seconds += time.perf_counter() - started
        if self._first is not None and header.index:
            self._first.taken(header.index - 1)
