"""What the engine's state means to those who ask whether the service is healthy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.errors import EngineError

if TYPE_CHECKING:
    from rollout.api import AsyncRollout

SERVING = "running"  # the state in which requests are served
ENDED = ("dead", "closed")  # the states that only a restart of the process ends


async def state_of(rollout: AsyncRollout) -> str:
    """``rollout.state()``; "dead" where the engine cannot even say."""
    try:
        return await rollout.state()
    except EngineError:
        return "dead"
