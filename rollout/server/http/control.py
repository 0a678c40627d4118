"""Control routes for trainers, with vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict

from rollout.api import AsyncRollout
from rollout.config import DEFAULT_TIMEOUT, MAX_TIMEOUT
from rollout.errors import InvalidRequest
from rollout.server.verbs import weight_info as weight_info_document

Timeout = Annotated[float, Query(gt=0, le=MAX_TIMEOUT)]  # seconds
PAUSE_MODES = ("keep", "wait", "abort")


class AbortBody(BaseModel):
    """``request_ids`` absent or null: every request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    request_ids: list[str] | None = None


def control_routes(rollout: AsyncRollout) -> APIRouter:
    """Pause, sleep, caches, aborts and what the weights are; errors arrive as JSON."""
    router = APIRouter()
    _add_pausing(router, rollout)
    _add_sleeping(router, rollout)
    _add_looking(router, rollout)

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, Any]:
        await rollout.reset_prefix_cache()
        return {"success": True}

    @router.post("/abort_requests")
    async def abort_requests(body: AbortBody | None = None) -> dict[str, Any]:
        ids = body.request_ids if body else None
        return {"aborted": await rollout.abort(ids)}

    return router


def _add_pausing(router: APIRouter, rollout: AsyncRollout) -> None:
    @router.post("/pause")
    async def pause(
        mode: str = "abort", clear_cache: bool = False, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> dict[str, Any]:
        """vLLM's default: running requests end with what they have."""
        _check(mode in PAUSE_MODES, f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        await rollout.pause_generation(mode, timeout)
        if clear_cache:
            await rollout.reset_prefix_cache()
        return {"status": "paused"}

    @router.post("/resume")
    async def resume() -> dict[str, Any]:
        await rollout.resume_generation()
        return {"status": "resumed"}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, Any]:
        return {"is_paused": (await rollout.metrics()).state == "paused"}


def _add_sleeping(router: APIRouter, rollout: AsyncRollout) -> None:
    @router.post("/sleep")
    async def sleep(level: int = 1, timeout: Timeout = DEFAULT_TIMEOUT) -> dict[str, Any]:
        _check(level in (1, 2), f"level must be 1 or 2, got {level}")
        await rollout.sleep(level, timeout)
        return {"status": "asleep", "level": level}

    @router.post("/wake_up")
    async def wake_up(
        tags: Annotated[list[str] | None, Query()] = None, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> dict[str, Any]:
        await rollout.wake_up(tags, timeout)
        return {"status": "awake"}

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, Any]:
        return {"is_sleeping": (await rollout.metrics()).state == "asleep"}


def _add_looking(router: APIRouter, rollout: AsyncRollout) -> None:
    @router.get("/weight_info")
    async def weight_info() -> dict[str, Any]:
        return weight_info_document(await rollout.weight_info())

    @router.get("/get_world_size")
    async def get_world_size() -> dict[str, Any]:
        info = await rollout.weight_info()
        return {"world_size": info.tensor_parallel_size}


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidRequest(message)
