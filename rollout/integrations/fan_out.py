"""One stream of tensors as one update of several engines, which commit together."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from rollout.api import AsyncRollout, Rollout
from rollout.config import DEFAULT_TIMEOUT
from rollout.distributed.native_thread import on_this_stream
from rollout.errors import WeightError
from rollout.rpc.client import RolloutClient
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.receipts import UpdateReceipt

_LOOK = 0.2  # seconds between looks at whether another engine has failed
_AHEAD = 2  # tensors that one engine may be ahead of the slowest
Items = Iterator[tuple[str, Tensor]]
_Next = tuple[str, Tensor] | Exception | None  # the next tensor, what the source raised, or its end


class FanOut:
    """Engines by their gRPC addresses, each with its token; they stay connected until ``close``.

    ``options`` are those of ``Rollout.update_weights``.
    """

    def __init__(self, engines: Mapping[str, str | None], **options: Any) -> None:
        self._options = options
        self._vote = _Vote(len(engines), options.get("timeout", DEFAULT_TIMEOUT))
        self._engines: dict[str, Rollout] = {}
        try:
            for address, token in engines.items():
                self._engines[address] = self._connect(address, token)
        except BaseException:
            self.close()
            raise

    def update(self, items: Items) -> list[UpdateReceipt]:
        """Every engine's receipt; where one refuses, no engine commits and its error is raised.

        ``items`` is read here, in the caller's thread. No engine commits before all have voted yes;
        one that dies after that leaves the others at the new version, and its error says so.
        """
        if len(self._engines) == 1:
            [engine] = self._engines.values()
            return [engine.update_weights(items, **self._options)]
        self._vote.begin()
        lanes = [_Lane(address, engine, self._vote) for address, engine in self._engines.items()]
        for lane in lanes:
            lane.start(self._options)
        try:
            self._feed(items, lanes)
        except BaseException as error:
            self._vote.give_up(error)
            raise
        finally:
            for lane in lanes:
                lane.thread.join()
        return [lane.receipt(lanes) for lane in lanes]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.shutdown()

    def _connect(self, address: str, token: str | None) -> Rollout:
        client = _Client(address, token, self._options.get("timeout", DEFAULT_TIMEOUT))
        client.vote = self._vote
        return Rollout.over(lambda: AsyncRollout.over(client))

    def _feed(self, items: Items, lanes: list[_Lane]) -> None:
        try:
            for item in items:
                if not all(lane.put(item) for lane in lanes):
                    return  # its error is told when all have ended
            last = None
        except Exception as error:  # noqa: BLE001 - the trainer's own: each update says what it says
            last = error
        for lane in lanes:
            lane.put(last)


class _Vote:
    """Where engines that have voted yes wait for one another; ``failure``: the first of any."""

    def __init__(self, size: int, timeout: float) -> None:
        self._size, self._timeout = size, timeout
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        self._barrier = threading.Barrier(self._size)
        self.failure: BaseException | None = None

    def give_up(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error
        self._barrier.abort()

    def wait(self) -> None:
        """Before a commit; ``WeightError`` where another engine did not vote yes."""
        if self._size == 1:
            return
        try:
            # The slowest may take a whole vote longer than the first.
            self._barrier.wait(2 * self._timeout)
        except threading.BrokenBarrierError:
            why = self.failure or f"another engine has not voted within {2 * self._timeout:g} s"
            raise WeightError(f"no engine commits: {why}") from self.failure


class _Client(RolloutClient):
    vote: _Vote

    def open(self) -> Any:
        return _Channel(super().open(), self.vote)


class _Channel:
    """``WeightChannel``; it commits when every engine has voted yes."""

    def __init__(self, inner: WeightChannel, vote: _Vote) -> None:
        self._inner, self._vote = inner, vote

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def commit(self) -> UpdateReceipt:
        self._vote.wait()
        return self._inner.commit()


class _Lane:
    """One engine's update, in a thread of its own."""

    def __init__(self, address: str, engine: Rollout, vote: _Vote) -> None:
        self.address, self._engine, self._vote = address, engine, vote
        self._items: queue.Queue[_Next] = queue.Queue(_AHEAD)
        self._receipt: UpdateReceipt | None = None

    def start(self, options: Mapping[str, Any]) -> None:
        name = f"rollout-update-{self.address}"
        run = on_this_stream(partial(self._run, options))
        self.thread = threading.Thread(target=run, name=name, daemon=True)
        self.thread.start()

    def put(self, item: _Next) -> bool:
        """Waits while this engine is behind; False once any has failed."""
        while self._vote.failure is None:
            with suppress(queue.Full):
                self._items.put(item, timeout=_LOOK)
                return True
        return False

    def receipt(self, lanes: list[_Lane]) -> UpdateReceipt:
        """Its own, after all have ended; raises the first failure of any."""
        if (failure := self._vote.failure) is not None:
            done = [lane.address for lane in lanes if lane._receipt is not None]
            if done:
                failure.add_note(f"these engines had committed already: {', '.join(done)}")
            raise failure
        assert self._receipt is not None
        return self._receipt

    def _run(self, options: Mapping[str, Any]) -> None:
        try:
            self._receipt = self._engine.update_weights(self._taken(), **options)
        except BaseException as error:  # noqa: BLE001 - it is raised where all are waited for
            self._vote.give_up(error)

    def _taken(self) -> Items:
        while True:
            try:
                item = self._items.get(timeout=_LOOK)
            except queue.Empty:
                if (failure := self._vote.failure) is not None:
                    raise WeightError(f"no engine commits: {failure}") from failure
                continue
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item
