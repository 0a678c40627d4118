"""Buckets that come to a member of a fleet from another host, and go on to the next as they come.

    a feed, or the update's own stream --> memory of this host --Forwarder--> a feed of the next

Bytes go on as they arrive, not bucket by bucket, so a chain of hosts costs little more time than
one. A feed is only a way for bytes: what a bucket holds, and in which order they come, the update's
own stream says; it brings the bytes itself where the feed has failed.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rollout.distributed.native_thread import NativeThread
from rollout.errors import TransferFailed
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.chunks import Chunk
from rollout.rpc.client import RolloutClient
from rollout.rpc.status import CHUNK
from rollout.rpc.tls import ClientTls, ServerTls
from rollout.weight_sync.protocol.bucket import check_size
from rollout.weight_sync.protocol.link import Forward
from rollout.weight_sync.protocol.messages import BucketHeader
from rollout.wire.codec import from_json, to_json
from rollout.wire.frames import tensor_bytes

HALVES = 2  # buckets that lie in memory at a time
DUE = 8  # announcements that wait for their bytes: a front has two under way
BEAT = 0.2  # seconds between signs of life while there is nothing to send
SILENCE = 1.0, 5.0  # seconds without one after which a feed is given up: a quarter of a wait
GONE = 30.0  # seconds without one after which the connection of a feed is let go
CONNECT = 5.0  # seconds in which the next host has to answer


@dataclass(slots=True)
class _Lying:
    """A bucket in memory, of which the first ``have`` bytes are there."""

    memory: Tensor
    have: int = 0


class Relay:
    """One update's buckets at a member. Thread-safe.

    ``place``: the memory of bucket ``index``, uint8 [nbytes]. It is used again two buckets later,
    which nobody begins before every member has taken the first. ``deliver``: hands a bucket that
    is there to the engine. ``limit``: bytes of a bucket.
    """

    def __init__(
        self,
        place: Callable[[int, int], Tensor],
        deliver: Callable[[BucketHeader, Tensor], None],
        limit: int,
    ) -> None:
        self.secret = secrets.token_hex(16)
        self._place, self._deliver, self._limit = place, deliver, limit
        self._changed = threading.Condition()
        self._lying: dict[int, _Lying] = {}
        self._due: dict[int, BucketHeader] = {}  # announced, and not brought yet
        self._coming: BucketHeader | None = None  # what the feed brings now
        self._fed = self._taken = 0  # buckets that the feed has begun; that were waited for
        self._beat = time.monotonic()
        self._lost = ""  # why no feed brings anything any more
        self._error: Exception | None = None
        self._joined = self._closed = False
        self._forwarder: Forwarder | None = None

    # ---- the update's own stream ----

    def start(self, index: int, nbytes: int) -> Tensor:
        """Memory for a bucket whose bytes that stream brings; the feed has no say any more."""
        with self._changed:
            self._give_up("the update's own stream brings the bytes")
            return self._start(index, nbytes).memory

    def arrived(self, index: int, have: int) -> None:
        with self._changed:
            self._lying[index].have = have
            self._changed.notify_all()

    def expect(self, header: BucketHeader) -> None:
        """A bucket that the feed brings, or has brought."""
        with self._changed:
            if len(self._due) >= DUE:
                raise TransferFailed(
                    f"bucket {header.index} was announced while {DUE} before it have not come: "
                    "wait for one of them first"
                )
            self._due[header.index] = header
            self._deliver_whole()

    def brought(self, index: int, timeout: float) -> tuple[str, int]:
        """Wait for the feed to bring an announced bucket: why it did not ("" where it did), and
        the first that it did not bring.
        """
        began = time.monotonic()
        silence = min(max(timeout / 4, SILENCE[0]), SILENCE[1])
        with self._changed:
            while index in self._due:
                now = time.monotonic()
                if self._error is not None:
                    raise self._error
                if now - max(self._beat, began) > silence:
                    self._give_up(f"no sign of life for {silence:g} s")
                elif now - began > timeout / 2:
                    self._give_up(f"not here after {timeout / 2:g} s")
                if self._lost:
                    first = min(self._due)
                    self._due.clear()
                    return self._lost, first
                self._changed.wait(silence / 4)
            if index in self._lying:
                self._taken = max(self._taken, index + 1)
        return "", index

    def forward(self, forwarder: Forwarder) -> None:
        """Have all buckets go on; before the first."""
        try:
            with self._changed:
                if self._forwarder is not None or self._lying or self._closed:
                    raise TransferFailed("an update goes on to one host, from its first bucket on")
                self._forwarder = forwarder
            forwarder.connect(self)
        except BaseException:
            with self._changed:
                if self._forwarder is forwarder:
                    self._forwarder = None
            forwarder.close()
            raise

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._give_up("the update is over here")
            forwarder, self._forwarder = self._forwarder, None
            self._changed.notify_all()
        if forwarder is not None:
            forwarder.close()

    # ---- the feed ----

    def join(self) -> None:
        with self._changed:
            if self._joined or self._closed:
                raise TransferFailed("this update has a feed already, or is over")
            self._joined, self._beat = True, time.monotonic()

    def take(self, command: Any) -> None:
        """What the feed says next; ``TransferFailed`` where it may not, or is not wanted."""
        kind = command.WhichOneof("kind")
        with self._changed:
            self._beat = time.monotonic()
            if self._lost:
                raise TransferFailed(self._lost)
            if kind == "bucket" and self._coming is None:
                self._begin(from_json(BucketHeader, command.bucket.header_json))
            elif kind != "chunk" or (command.chunk and self._coming is None):
                raise TransferFailed(f"a feed brings buckets and their bytes, not {kind}")
            if kind == "chunk" and command.chunk:
                self._add(command.chunk)
            self._changed.notify_all()

    def leave(self, why: str) -> None:
        """The feed's stream is over."""
        with self._changed:
            self._give_up(why)

    # ---- the forwarder ----

    def next(self, at: Forwarder) -> Any:
        """The next command for it, once there is one, or a sign of life; None: there is no more."""
        deadline = time.monotonic() + BEAT
        with self._changed:
            while not self._closed and not at.cut:
                lying = self._lying.get(at.index)
                if lying is not None and (command := at.command(lying.memory, lying.have)):
                    return command
                if (left := deadline - time.monotonic()) <= 0:
                    return Chunk(b"")
                self._changed.wait(left)
            return None

    # ---- helpers; the lock is held ----

    def _start(self, index: int, nbytes: int) -> _Lying:
        at = self._forwarder
        if at is not None and at.index <= index - HALVES:
            # Every member has that bucket, or is out: whoever is behind the forwarder, too.
            at.cut = True
        for old in [one for one in self._lying if one <= index - HALVES]:
            del self._lying[old]
        found = self._lying.get(index)
        if found is None or found.memory.numel() != nbytes:  # a feed had announced it wrongly
            found = self._lying[index] = _Lying(self._place(index, nbytes))
        found.have = 0
        return found

    def _begin(self, header: BucketHeader) -> None:
        check_size(header, self._limit)
        if header.messages:  # of which that check has seen nothing else
            raise TransferFailed(f"bucket {header.index} has messages, and bytes in a feed")
        if header.index != self._fed or header.index >= self._taken + HALVES:
            raise TransferFailed(f"bucket {header.index} comes out of turn")
        self._fed += 1
        self._start(header.index, header.nbytes)
        self._coming = header
        if not header.nbytes:
            self._add(b"")

    def _add(self, chunk: bytes | memoryview) -> None:
        assert self._coming is not None
        lying, total = self._lying[self._coming.index], self._coming.nbytes
        if lying.have + len(chunk) > total:
            raise TransferFailed(f"bucket {self._coming.index} is longer than it announced")
        tensor_bytes(lying.memory)[lying.have : lying.have + len(chunk)] = chunk
        lying.have += len(chunk)
        if lying.have == total:
            self._coming = None
            self._deliver_whole()

    def _deliver_whole(self) -> None:
        for index in sorted(self._due):
            lying, header = self._lying.get(index), self._due[index]
            if lying is None or lying.have < lying.memory.numel():
                return
            del self._due[index]
            try:
                if lying.memory.numel() != header.nbytes:
                    raise TransferFailed(f"bucket {index} is not as long as it was announced")
                self._deliver(header, lying.memory)
            except Exception as error:  # noqa: BLE001 - raised by the stream's own thread
                self._error = error
                self._due[index] = header
                return

    def _give_up(self, why: str) -> None:
        self._lost, self._coming = self._lost or why, None
        self._changed.notify_all()


class Forwarder:
    """Takes a relay's buckets on to another member: the client's end of a feed."""

    def __init__(self, wanted: Forward, shown: ServerTls | None) -> None:
        """``shown``: our own certificate, where the other asks for one."""
        self._wanted = wanted
        tls = ClientTls.of_peer(wanted.tls_ca, wanted.tls_server_name, shown)
        self._client = RolloutClient(
            wanted.address, wanted.token or None, wanted.timeout, tls, keeps_epoch=False
        )
        self._call: Any = None
        self.index, self._at = 0, -1  # the bucket, and its next byte; -1: it was not announced
        self.cut = False  # it was too far behind

    def connect(self, relay: Relay) -> None:
        """Returns once the other has accepted; raises why it has not."""
        limit = min(CONNECT, self._wanted.timeout)
        self._call = self._client.feed(self._commands(relay), limit)

    def command(self, memory: Tensor, have: int) -> Any:
        """The next one of its bucket, of which ``have`` bytes are there; None: not yet."""
        nbytes = memory.numel()
        if self._at < 0:
            self._at = 0
            head = to_json(BucketHeader(self.index, (), nbytes))
            if not nbytes:
                self._to_next()
            return pb.UpdateCommand(bucket=pb.Bucket(header_json=head, payload_bytes=nbytes))
        if have <= self._at:
            return None
        # Where it stands is said before it is sent: whoever has the bytes is past them.
        start, self._at = self._at, min(have, self._at + CHUNK)
        piece = tensor_bytes(memory)[start : self._at]
        if self._at == nbytes:
            self._to_next()
        return Chunk(piece)

    def close(self) -> None:
        self.cut = True
        if self._call is not None:
            self._call.cancel()
        # It waits for what is being written, for seconds where that does not arrive, and the vote
        # of this member, whose weights are whole, would wait with it.
        with suppress(RuntimeError):  # the process ends
            NativeThread("rollout-feed-end", self._client.close).start()

    def _to_next(self) -> None:
        self.index, self._at = self.index + 1, -1

    def _commands(self, relay: Relay) -> Iterator[Any]:
        wanted = self._wanted
        yield pb.UpdateCommand(feed=pb.Feed(update_id=wanted.update_id, secret=wanted.secret))
        while (command := relay.next(self)) is not None:
            yield command


class Relays:
    """Those of one server, by update; ``shown``: its certificate. Thread-safe."""

    def __init__(self, shown: ServerTls | None = None) -> None:
        self.shown = shown
        self._found: dict[str, Relay] = {}

    def add(self, update_id: str, relay: Relay) -> None:
        self._found[update_id] = relay

    def remove(self, update_id: str, relay: Relay) -> None:
        if self._found.get(update_id) is relay:
            with suppress(KeyError):
                del self._found[update_id]

    def find(self, feed: Any) -> Relay:
        """The relay that a feed names, if it knows its secret; or ``TransferFailed``."""
        found = self._found.get(feed.update_id)
        if found is None or not secrets.compare_digest(found.secret.encode(), feed.secret.encode()):
            raise TransferFailed(f"update {feed.update_id!r:.80} takes no feed here")
        return found
