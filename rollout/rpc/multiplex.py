"""A client's streamed calls over one stream to the service: a message has what all have new."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from rollout.distributed.wakeup import Wakeup
from rollout.errors import EngineClosed, RolloutError, TransferFailed, from_wire
from rollout.generation import RequestOutput
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.convert import output_from_proto
from rollout.rpc.growth import Cumulative, GrownRow, grown_rows


class Multiplex:
    """Of the loop that calls it. The stream is open for as long as calls are under way.

    It is read at once, whoever reads the outputs: of a row whose reader is behind the newest output
    is kept, so that none holds back others.
    """

    def __init__(
        self,
        open: Callable[[Any], Any],
        lost: Callable[[Any], RolloutError],
        check: Callable[[RequestOutput], None],
    ) -> None:
        """``open``: begins the call, of its commands; ``lost``: the error of one that broke;
        ``check``: raises where an output may not be read.
        """
        self._open, self._lost, self._check = open, lost, check
        self._stream: _Stream | None = None
        self._reading: set[asyncio.Task[None]] = set()

    async def outputs(self, **request: Any) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Of one call: ``generate`` or ``chat``. Left early, it is cancelled there."""
        loop = asyncio.get_running_loop()
        if (stream := self._stream) is None or stream.is_over or stream.loop is not loop:
            self._stream = stream = _Stream(self._open, self._lost, loop, self._reading)
        number, call = stream.begin(request)
        try:
            while (item := await call.next()) is not None:
                self._check(item[1])
                yield item
        finally:
            stream.end(number)

    async def close(self) -> None:
        """End all calls; within the loop that has made them."""
        tasks = [task for task in self._reading if task.get_loop() is asyncio.get_running_loop()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._stream = None


async def read_ahead(
    outputs: AsyncGenerator[tuple[int, RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """The same of a stream that is one call's alone: it is read at once, the newest is kept."""
    call = _Call()

    async def read() -> None:
        try:
            async for index, output in outputs:
                call.put(index, output, is_added=False)
        except asyncio.CancelledError:  # by us, or as its connection was closed
            call.end(EngineClosed("the connection was closed while the call ran"))
            raise
        except Exception as error:  # noqa: BLE001 - raised where the outputs are read
            call.end(error)
        else:
            call.end(None)

    reading = asyncio.create_task(read())
    try:
        while (item := await call.next()) is not None:
            yield item
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await outputs.aclose()


class _Stream:
    """``tasks`` has the one that reads while it does. Nothing here holds it: an error that ends it
    would hold this in turn, and the gRPC call, whose channel stays connected for as long.
    """

    def __init__(
        self,
        open: Callable[[Any], Any],
        lost: Callable[[Any], RolloutError],
        loop: asyncio.AbstractEventLoop,
        tasks: set[asyncio.Task[None]],
    ) -> None:
        self.loop, self.is_over = loop, False  # over: it takes no calls any more
        self._lost = lost
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._commands: asyncio.Queue[Any] = asyncio.Queue()
        self._call = open(self._sent())
        reading = loop.create_task(self._read())
        tasks.add(reading)
        # Not within ``_read``: a task that is cancelled before it has begun never gets there.
        reading.add_done_callback(self._ended)
        reading.add_done_callback(tasks.discard)

    def begin(self, request: Mapping[str, Any]) -> tuple[int, _Call]:
        number, call = next(self._numbers), _Call()
        self._calls[number] = call
        self._commands.put_nowait(pb.MultiplexRequest(call=number, grown=True, **request))
        return number, call

    def end(self, number: int) -> None:
        """Nobody reads the call any more; with the last one the stream ends."""
        if self._calls.pop(number, None) is not None:
            self._commands.put_nowait(pb.MultiplexRequest(call=number, cancel=pb.Done()))
        if not self._calls and not self.is_over:
            self.is_over = True
            self._commands.put_nowait(None)

    async def _read(self) -> None:
        try:
            await self._read_all()
        finally:
            self.is_over = True

    async def _read_all(self) -> None:
        async for message in self._call:
            for one in message.outputs:
                if (reader := self._calls.get(one.call)) is not None:
                    reader.put(one.index, output_from_proto(one.output), one.added)
            if message.HasField("grown"):
                for number, index, row in grown_rows(message.grown):
                    if (reader := self._calls.get(number)) is not None:
                        reader.grow(index, row)
            for end in message.ended:
                if (reader := self._calls.pop(end.call, None)) is not None:
                    reader.end(from_wire(json.loads(end.error)) if end.error else None)

    def _ended(self, reading: asyncio.Task[None]) -> None:
        """The calls that run end, too: what went wrong is raised where they are read."""
        found = None if reading.cancelled() else reading.exception()
        problem = found if isinstance(found, Exception) else None
        self.is_over = True
        self._call.cancel()
        self._commands.put_nowait(None)  # else what sends them waits for more for ever
        for reader in self._calls.values():
            reader.end(self._error(problem))
        self._calls.clear()

    def _error(self, problem: Exception | None) -> Exception:
        """One for each reader: tracebacks grow where it is raised."""
        if not isinstance(problem, grpc.RpcError):
            return problem or EngineClosed("the connection was closed while the call ran")
        error = self._lost(problem)
        error.__cause__ = problem
        return error

    async def _sent(self) -> AsyncIterator[Any]:
        while (command := await self._commands.get()) is not None:
            yield command


class _Call:
    """What has come of one call, and was not read yet."""

    def __init__(self) -> None:
        self._rows: dict[int, Cumulative] = {}
        self._unread: dict[int, None] = {}  # in the order that they have waited
        self._ended = False
        self._error: Exception | None = None
        self._more = Wakeup()

    def put(self, index: int, output: RequestOutput, is_added: bool) -> None:
        if is_added:
            self._rows[index].add(output)
        else:
            self._rows[index] = Cumulative(output)
        self._has_come(index)

    def grow(self, index: int, more: GrownRow) -> None:
        if index not in self._rows:
            raise TransferFailed("a row has grown of which nothing had come")
        self._rows[index].grow(more)
        self._has_come(index)

    def end(self, error: Exception | None) -> None:
        self._ended, self._error = True, error
        self._more.wake()

    async def next(self) -> tuple[int, RequestOutput] | None:
        """The newest output of the row that has waited longest; None: there is no more."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            await self._more.next()
        index = next(iter(self._unread))
        del self._unread[index]
        return index, self._rows[index].output()

    def _has_come(self, index: int) -> None:
        self._unread[index] = None
        self._more.wake()
