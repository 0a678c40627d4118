"""What the engine's state means to who asks for its health, and the health service of gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthServicer

from rollout.errors import EngineError
from rollout.rpc import rollout_pb2 as pb

if TYPE_CHECKING:
    from rollout.api import AsyncRollout

SERVING = "running"  # the state in which requests are served
ENDED = ("dead", "closed")  # the states that only a restart of the process ends
LOOK = 0.2  # seconds between looks at the state while somebody watches it
MAX_WATCHERS = 256  # they need no token, and each holds one of the calls the server may have
_STATUS = health_pb2.HealthCheckResponse


async def state_of(rollout: AsyncRollout) -> str:
    """``rollout.state()``; "dead" where the engine cannot even say."""
    try:
        return await rollout.state()
    except EngineError:
        return "dead"


class HealthService(HealthServicer):  # type: ignore[misc]
    """Generation, and the server as a whole (""), are SERVING while requests are served.

    WeightSync and Control are as long as the engine lives: they are what mends a broken engine and
    wakes one that is paused or asleep.
    """

    def __init__(self, rollout: AsyncRollout) -> None:
        self._rollout = rollout
        self._stopping = False
        self._watchers = 0
        services = [s.full_name for s in pb.DESCRIPTOR.services_by_name.values()]
        self._names: Sequence[str] = ("", *services)

    def stop(self) -> None:
        """Nothing is served from now on."""
        self._stopping = True

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _STATUS(status=await self._status(request.service))

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        statuses = {name: _STATUS(status=await self._status(name)) for name in self._names}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """The status now, and again whenever it has changed."""
        if self._watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch already")
        self._watchers += 1
        try:
            last = None
            while True:
                status = await self._status(request.service)
                if status != last:
                    yield _STATUS(status=status)
                last = status
                await asyncio.sleep(LOOK)
        finally:
            self._watchers -= 1

    async def _status(self, name: str) -> Any:
        if name not in self._names:
            return _STATUS.SERVICE_UNKNOWN
        if self._stopping:
            return _STATUS.NOT_SERVING
        state = await state_of(self._rollout)
        generates = name == "" or name.endswith(".Generation")
        serves = state == SERVING if generates else state not in ENDED
        return _STATUS.SERVING if serves else _STATUS.NOT_SERVING
