"""The streamed calls of one client over one stream: what all of them have new is one message."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from rollout.api.backend import Outputs
from rollout.errors import InvalidRequest, RolloutError, to_wire
from rollout.generation import RequestOutput
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.convert import output_to_proto
from rollout.rpc.growth import GrownRows, added

log = logging.getLogger(__name__)
MESSAGE = 1 << 20  # bytes from which on the rest goes in the next message
UNSENT = 4096  # ended calls whose answers nobody has read, from which on commands wait
Row = tuple[int, int]  # a call, and the prompt in it


class Multiplexed:
    """Runs calls, and answers with the newest output of each row that has one.

    A client that reads slowly holds back its messages, not its calls: outputs that were not sent
    yet give way to newer ones.
    """

    def __init__(self, start: Mapping[str, Callable[[Any], Outputs]]) -> None:
        """``start``: by the name of the command, what makes the outputs of its request."""
        self._start = start
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._newest: dict[Row, RequestOutput] = {}  # not sent yet
        self._sent: dict[int, dict[int, RequestOutput]] = {}  # the last one of each row
        self._ended: dict[int, bytes] = {}
        self._some = asyncio.Event()
        self._sending = asyncio.Event()  # the last answers are on their way
        self._reads_grown = False

    async def answers(self, commands: AsyncIterator[Any]) -> AsyncGenerator[Any]:
        """Until ``commands`` have ended, and all calls. Ended early, it ends the calls."""
        reader = asyncio.create_task(self._read(commands))
        reader.add_done_callback(lambda _: self._some.set())
        try:
            while not (reader.done() and not self._calls and not self._ended):
                await self._some.wait()
                self._some.clear()
                self._sending.set()
                if reader.done():
                    reader.result()
                for message in self._messages():
                    yield message
        finally:
            tasks = [reader, *self._calls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---- helpers ----

    async def _read(self, commands: AsyncIterator[Any]) -> None:
        async for command in commands:
            if isinstance(command, RolloutError):
                raise command
            # A client that reads nothing may begin no calls for good: each would be kept.
            while len(self._ended) >= UNSENT:
                self._sending.clear()
                await self._sending.wait()
            number, kind = command.call, command.WhichOneof("command")
            self._reads_grown |= command.grown
            if kind == "cancel":
                if task := self._calls.pop(number, None):
                    task.cancel()
                    self._forget(number)
            elif kind is None or number in self._calls:
                raise InvalidRequest(f"call {number} is no new one with a request")
            else:
                run = self._run(number, self._start[kind], getattr(command, kind))
                self._calls[number] = asyncio.create_task(run)

    async def _run(self, number: int, start: Callable[[Any], Outputs], request: Any) -> None:
        error = b""
        try:
            async with contextlib.aclosing(start(request)) as outputs:
                async for index, output in outputs:
                    self._newest[number, index] = output
                    self._some.set()
        except Exception as problem:
            if not isinstance(problem, RolloutError):
                log.error("a call failed", exc_info=problem)
            error = json.dumps(to_wire(problem)).encode()
        self._calls.pop(number, None)
        self._ended[number] = error
        self._some.set()

    def _messages(self) -> Iterator[Any]:
        """Of what there is now; the ends of calls come last."""
        newest, self._newest = self._newest, {}
        ended, self._ended = self._ended, {}
        part, grown, size = [], GrownRows(), 0
        for (number, index), output in newest.items():
            if number not in self._calls and number not in ended:
                continue  # cancelled while a message before this one was read
            rows = self._sent.setdefault(number, {})
            before, rows[index] = rows.get(index), output
            if before is not None and self._reads_grown:
                if grown.size > MESSAGE:
                    yield pb.MultiplexResponse(grown=grown.message())
                    grown = GrownRows()
                if grown.add(number, index, before, output):
                    continue
            more = None if before is None else added(before, output)
            part.append(
                pb.CallOutput(
                    call=number, index=index, added=more is not None,
                    output=output_to_proto(output if more is None else more),
                )
            )  # fmt: skip
            size += part[-1].ByteSize()
            if size > MESSAGE:
                yield pb.MultiplexResponse(outputs=part)
                part, size = [], 0
        ends = [pb.CallEnd(call=number, error=error) for number, error in ended.items()]
        for number in ended:
            self._sent.pop(number, None)
        if part or ends or grown.rows:
            yield pb.MultiplexResponse(outputs=part, ended=ends, grown=grown.message())

    def _forget(self, number: int) -> None:
        self._sent.pop(number, None)
        for row in [row for row in self._newest if row[0] == number]:
            del self._newest[row]
