"""The gRPC service of weights; its updates are in ``updates``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from rollout.errors import EngineClosed, InvalidRequest, RolloutError, TransferFailed
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.chunks import document, padded
from rollout.rpc.tls import ServerTls
from rollout.server.grpc.relay import GONE, Relay, Relays
from rollout.server.grpc.services import (
    abort_with,
    answers,
    checked,
    seconds,
)
from rollout.server.grpc.updates import HeldUpdates, UpdateStream
from rollout.server.verbs import (
    AbortBody,
    FinishBody,
    InitBody,
    StartBody,
    UpdateBody,
    Verbs,
    parse,
    served_of,
)
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.membership import (
    AskReport,
    AskRoutes,
    Grant,
    PrepareRollback,
    SendTo,
)
from rollout.weight_sync.protocol.messages import Decision
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.transports import served
from rollout.wire.codec import from_json, parsed
from rollout.wire.repeated import RepeatedWriter

if TYPE_CHECKING:
    from rollout.api import AsyncRollout


class WeightSyncService:
    def __init__(self, rollout: AsyncRollout, tls: ServerTls | None = None) -> None:
        """``tls``: what it is served with, which it shows to engines that it sends weights to."""
        self._tls, self._relays = tls, Relays(tls)
        self._rollout, self._verbs = rollout, Verbs(rollout)
        self._held = HeldUpdates(self._relays)
        self._open: set[UpdateStream] = set()
        self._infos = RepeatedWriter("tensors")

    @answers
    async def Info(self, request: Any) -> Any:  # noqa: N802
        info = await asyncio.to_thread(self._rollout.backend.info)
        # Bytes that go with the calls go through this port here, in a stream that survives a cut.
        offers = served(info.transports)
        if "cards" not in request.features:
            info = replace(info, reaches=(), hosts=())
        return document(replace(info, transports=offers), self._infos.to_json)

    @answers
    async def Decide(self, request: Any) -> Any:  # noqa: N802
        decision, backend = from_json(Decision, request.json), self._rollout.backend
        receipt = await self._rollout.threads.run(lambda: backend.decide(decision))
        return pb.WeightDocument() if receipt is None else document(receipt)

    @answers
    async def Serve(self, request: Any) -> Any:  # noqa: N802
        grant, backend = from_json(Grant, request.json), self._rollout.backend
        return padded(await asyncio.to_thread(backend.serve, grant))

    @answers
    async def Routes(self, request: Any) -> Any:  # noqa: N802
        ask = from_json(AskRoutes, request.json)
        return document(await served_of(self._rollout).routes(ask))

    @answers
    async def Report(self, request: Any) -> Any:  # noqa: N802
        ask = from_json(AskReport, request.json)
        return document(served_of(self._rollout).report(ask))

    @answers
    async def SendTo(self, request: Any) -> Any:  # noqa: N802
        wanted, backend, tls = from_json(SendTo, request.json), self._rollout.backend, self._tls
        return document(await self._rollout.threads.run(lambda: backend.send_to(wanted, tls)))

    @answers
    async def UpdateFrom(self, request: Any) -> Any:  # noqa: N802
        options = UpdateOptions.on_server(_options(request.options_json))
        path, backend = request.path, self._rollout.backend
        receipt = await self._rollout.threads.run(lambda: backend.update_from(path, options))
        return document(receipt)

    @answers
    async def Rollback(self, request: Any) -> Any:  # noqa: N802
        receipt = await self._rollout.rollback(seconds(request))
        return document(receipt)

    @answers
    async def PrepareRollback(self, request: Any) -> Any:  # noqa: N802
        wanted, backend = from_json(PrepareRollback, request.json), self._rollout.backend
        await self._rollout.threads.run(lambda: backend.prepare_rollback(wanted))
        return pb.Done()

    @answers
    async def Digests(self, request: Any) -> Any:  # noqa: N802
        timeout, backend = seconds(request), self._rollout.backend
        digests = await self._rollout.threads.run(lambda: backend.digests(timeout))
        return pb.DigestsResponse(digests=digests)

    @answers
    async def Receipts(self, request: Any) -> Any:  # noqa: N802
        receipts = await asyncio.to_thread(self._rollout.backend.receipts)
        documents = [document(receipt) for receipt in receipts]
        return pb.ReceiptsResponse(receipts=documents)

    @answers
    async def InitWeightTransferEngine(self, request: Any) -> Any:  # noqa: N802
        return document(await self._verbs.init(parse(InitBody, request.json)))

    @answers
    async def StartWeightUpdate(self, request: Any) -> Any:  # noqa: N802
        return document(await self._verbs.start(parse(StartBody, request.json)))

    @answers
    async def UpdateWeights(self, request: Any) -> Any:  # noqa: N802
        return document(await self._verbs.update(parse(UpdateBody, request.json)))

    @answers
    async def FinishWeightUpdate(self, request: Any) -> Any:  # noqa: N802
        return document(await self._verbs.finish(parse(FinishBody, request.json)))

    @answers
    async def AbortWeightUpdate(self, request: Any) -> Any:  # noqa: N802
        return document(await self._verbs.abort(parse(AbortBody, request.json)))

    async def Update(self, commands: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        commands, update = aiter(commands), None
        try:
            first = checked(await anext(commands, None))
            if first is not None and first.HasField("feed"):
                relay = self._relays.find(first.feed)
                relay.join()
                yield pb.UpdateEvent(begun=pb.WeightDocument())
                await _fed(relay, commands)
                return
            resume = first.resume if first is not None and first.HasField("resume") else None
            if resume is not None:
                update = self._held.find(resume)
                events = update.talk(commands, resume)
            else:
                update = UpdateStream(self._channel(first), self._held)
                events = update.talk(_behind(first, commands))
            self._open.add(update)
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the edge of the process
            await abort_with(context, error)
        finally:
            if update is not None:
                self._open.discard(update)

    def _channel(self, first: Any) -> WeightChannel:
        """What a new stream is about: an update of its own, or one more rank's part of another."""
        if first is None or not first.HasField("join"):
            return self._rollout.backend.open()
        lanes = self._held.find(first.join).lanes
        if lanes is None:
            raise TransferFailed(f"update {first.join.update_id:.80} has one stream alone")
        return lanes.open(first.join.lane)

    def shut_down(self) -> None:
        """Updates that are on a connection are over, and their clients told why."""
        for update in list(self._open):
            update.fail(EngineClosed("the engine was shut down during the update"))

    def close(self) -> None:
        """The server stops: what waits for its client to come back is given up."""
        self._held.end()


def _options(data: bytes) -> Any:
    """What a client says of an update from a directory, which need not say anything."""
    try:
        return parsed(data or b"{}")
    except TransferFailed as error:
        raise InvalidRequest(f"options_json: {error}") from error


async def _fed(relay: Relay, commands: AsyncIterator[Any]) -> None:
    """Until the feed ends, is silent for long, or brings what it may not."""
    why = "its feed broke off"
    try:
        while (command := await _next_of(commands)) is not None:
            await asyncio.to_thread(relay.take, checked(command))
        why = "its feed ended"
    except RolloutError as error:
        why = str(error)
        raise
    finally:
        relay.leave(why)


async def _next_of(commands: AsyncIterator[Any]) -> Any:
    try:
        async with asyncio.timeout(GONE):
            return await anext(commands, None)
    except TimeoutError:
        raise TransferFailed(f"a feed gave no sign of life for {GONE:g} s") from None


async def _behind(first: Any, commands: AsyncIterator[Any]) -> AsyncIterator[Any]:
    if first is not None:
        yield first
    async for command in commands:
        yield command
