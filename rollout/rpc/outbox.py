"""The commands of one update on their way out, kept until the server has them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollout.rpc.chunks import Chunk
from rollout.rpc.status import CHUNK


class Outbox:
    """One thread puts commands in, the iterator of one call at a time takes them out as messages.

    With ``keep`` messages are numbered from 0 and stay until ``received`` says that they have
    arrived, so that another call can go on where a broken one ended. Then at most ``window`` bytes
    of payload and one bucket's announcement are under way at a time: that is what a cut can cost.
    A payload is read while it is sent, not copied before.
    """

    def __init__(self, *, keep: bool = False, window: int = 0) -> None:
        self._keep, self._window = keep, window
        self._items: deque[_Item] = deque()
        self._end = self._next = self._received = 0  # numbers of messages
        self._under_way: deque[tuple[int, bool]] = deque()  # (bytes, announces a bucket) of each
        self._bytes = self._buckets = 0  # sums over ``_under_way``
        self._highest = 0  # a message below it has been sent before
        self._turn, self._open, self._closed = 0, True, False
        self._changed = threading.Condition()
        self.resent_bytes = self.resent_buckets = 0

    def put(self, command: Any) -> int:
        """How many messages there are then."""
        return self._put(_Item(command, None, self._end))

    def put_bucket(self, announcement: Any, payload: memoryview) -> None:
        """``payload`` stays untouched until all that is there then has arrived."""
        self._put(_Item(announcement, payload, self._end))

    def abort(self, command: Any) -> None:
        """``command`` goes next, and is the last: what has not been sent is dropped."""
        with self._changed:
            if not self._closed:
                self._items.clear()
                self._items.append(_Item(command, None, self._next))
                self._end, self._keep, self._closed = self._next + 1, False, True
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing follows: iterators end when all has been sent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def drop(self) -> None:
        """End every iterator now and let go of the payloads."""
        with self._changed:
            self._items.clear()
            self._turn, self._closed, self._end = -1, True, self._next
            self._changed.notify_all()

    def suspend(self) -> int:
        """The call broke: end its iterator. Returns the turn of the next one."""
        with self._changed:
            self._turn, self._open = self._turn + 1, False
            self._changed.notify_all()
            return self._turn

    def go_on(self, received: int) -> None:
        """Send what comes after the first ``received`` messages, again where need be."""
        with self._changed:
            self._arrived(received)
            self._under_way.clear()
            self._bytes = self._buckets = 0
            self._next, self._open = self._received, True
            self._changed.notify_all()

    def received(self, count: int) -> None:
        """The first ``count`` messages have arrived."""
        with self._changed:
            self._arrived(count)
            self._changed.notify_all()

    def messages(self, turn: int = 0) -> Iterator[Any]:
        """The messages of this turn as they may be sent; blocks between them."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._turn != turn or self._ready() or self._done())
                if self._turn != turn or not self._ready():
                    return
                item, index = self._take()
            yield item.message(index)

    # ---- helpers; the lock is held ----

    def _put(self, item: _Item) -> int:
        with self._changed:
            if not self._closed:
                item.first = self._end
                self._items.append(item)
                self._end += item.count
                self._changed.notify_all()
            return self._end

    def _done(self) -> bool:
        return self._closed and self._next >= self._end

    def _ready(self) -> bool:
        if not self._open or self._next >= self._end:
            return False
        if not self._keep:
            return True
        item = self._current()
        index = self._next - item.first
        if index == 0 and item.data is not None and self._buckets:
            return False
        return self._bytes == 0 or self._bytes + item.size(index) <= self._window

    def _current(self) -> _Item:
        return next(item for item in self._items if item.first + item.count > self._next)

    def _take(self) -> tuple[_Item, int]:
        item = self._current()
        index = self._next - item.first
        size, announces = item.size(index), index == 0 and item.data is not None
        if self._next < self._highest:
            self.resent_bytes += size
            self.resent_buckets += announces
        self._next += 1
        self._highest = max(self._highest, self._next)
        if self._keep:
            self._under_way.append((size, announces))
            self._bytes += size
            self._buckets += announces
        elif self._next == item.first + item.count:
            self._items.popleft()
        return item, index

    def _arrived(self, count: int) -> None:
        count = min(count, self._highest)
        for _ in range(min(count - self._received, len(self._under_way))):
            size, announces = self._under_way.popleft()
            self._bytes -= size
            self._buckets -= announces
        self._received = max(self._received, count)
        while self._items and self._items[0].first + self._items[0].count <= self._received:
            self._items.popleft()


@dataclass(slots=True)
class _Item:
    """One command, or a bucket: its announcement and then its bytes in chunks."""

    command: Any
    data: memoryview | None
    first: int  # the number of its first message

    @property
    def count(self) -> int:
        return 1 if self.data is None else 1 + -(-self.data.nbytes // CHUNK)

    def size(self, index: int) -> int:
        """Bytes of payload in message ``index``."""
        if self.data is None or index == 0:
            return 0
        return min(CHUNK, self.data.nbytes - (index - 1) * CHUNK)

    def message(self, index: int) -> Any:
        if self.data is None or index == 0:
            return self.command
        start = (index - 1) * CHUNK
        return Chunk(self.data[start : start + CHUNK])
