"""Control routes and low-level weight verbs for trainers, with vLLM's names and bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Body, Query, Request
from pydantic import BaseModel, ConfigDict

from rollout.config import DEFAULT_TIMEOUT, MAX_TIMEOUT
from rollout.engine.control import PAUSE_MODES
from rollout.errors import InvalidRequest
from rollout.server.auth import Access
from rollout.server.http.guard import Engine, Routes, WeightVerbs
from rollout.server.sglang_verbs import server_info as sglang_info
from rollout.server.verbs import (
    NO_CHECKPOINT_DELTAS,
    FinishBody,
    InitBody,
    StartBody,
    UpdateBody,
    WeightDirBody,
    update_from_directory,
)
from rollout.server.verbs import AbortBody as AbortUpdateBody
from rollout.server.verbs import server_info as server_info_document
from rollout.server.verbs import weight_info as weight_info_document

Timeout = Annotated[float, Query(gt=0, le=MAX_TIMEOUT)]  # seconds


class AbortBody(BaseModel):
    """``request_ids`` absent or null: every request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    request_ids: list[str] | None = None


routes = Routes()


@routes.on("POST", "/reset_prefix_cache", Access.CONTROL)
async def reset_prefix_cache(rollout: Engine) -> dict[str, Any]:
    await rollout.reset_prefix_cache()
    return {"success": True}


@routes.on("POST", "/abort_requests", Access.CONTROL)
async def abort_requests(rollout: Engine, body: AbortBody | None = None) -> dict[str, Any]:
    ids = body.request_ids if body else None
    return {"aborted": await rollout.abort(ids)}


@routes.on("POST", "/pause", Access.CONTROL)
async def pause(
    rollout: Engine,
    mode: str = "abort",
    clear_cache: bool = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> dict[str, Any]:
    """vLLM's default: running requests end with what they have."""
    _check(mode in PAUSE_MODES, f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
    await rollout.pause_generation(mode, timeout)
    if clear_cache:
        await rollout.reset_prefix_cache()
    return {"status": "paused"}


@routes.on("POST", "/resume", Access.CONTROL)
async def resume(rollout: Engine) -> dict[str, Any]:
    await rollout.resume_generation()
    return {"status": "resumed"}


@routes.on("GET", "/is_paused", Access.GENERATION)
async def is_paused(rollout: Engine) -> dict[str, Any]:
    return {"is_paused": (await rollout.metrics()).state == "paused"}


@routes.on("POST", "/sleep", Access.CONTROL)
async def sleep(
    rollout: Engine, level: int = 1, timeout: Timeout = DEFAULT_TIMEOUT
) -> dict[str, Any]:
    _check(level in (1, 2), f"level must be 1 or 2, got {level}")
    await rollout.sleep(level, timeout)
    return {"status": "asleep", "level": level}


@routes.on("POST", "/wake_up", Access.CONTROL)
async def wake_up(
    rollout: Engine,
    tags: Annotated[list[str] | None, Query()] = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> dict[str, Any]:
    await rollout.wake_up(tags, timeout)
    return {"status": "awake"}


@routes.on("GET", "/is_sleeping", Access.GENERATION)
async def is_sleeping(rollout: Engine) -> dict[str, Any]:
    return {"is_sleeping": (await rollout.metrics()).state == "asleep"}


@routes.on("GET", "/weight_info", Access.GENERATION)
async def weight_info(rollout: Engine) -> dict[str, Any]:
    return weight_info_document(await rollout.weight_info())


@routes.on("GET", "/get_world_size", Access.GENERATION)
async def get_world_size(rollout: Engine) -> dict[str, Any]:
    info = await rollout.weight_info()
    return {"world_size": info.tensor_parallel_size}


@routes.on("POST", "/init_weight_transfer_engine", Access.CONTROL)
async def init_weight_transfer_engine(verbs: WeightVerbs, body: InitBody) -> dict[str, Any]:
    return await verbs.init(body)


@routes.on("POST", "/start_weight_update", Access.CONTROL)
async def start_weight_update(
    verbs: WeightVerbs, body: Annotated[StartBody | None, Body()] = None
) -> dict[str, Any]:
    return await verbs.start(body or StartBody())


@routes.on("POST", "/update_weights", Access.CONTROL)
async def update_weights(
    rollout: Engine, verbs: WeightVerbs, body: UpdateBody | WeightDirBody
) -> dict[str, Any]:
    """vLLM's broadcast, or prime-rl's directory."""
    if isinstance(body, WeightDirBody):
        return await update_from_directory(rollout, body)
    return await verbs.update(body)


@routes.on("POST", "/fetch_weights", Access.CONTROL)
async def fetch_weights() -> dict[str, Any]:
    """SkyRL's, of a checkpoint's delta, whatever its body: it can name nothing else."""
    raise InvalidRequest(NO_CHECKPOINT_DELTAS)


@routes.on("POST", "/finish_weight_update", Access.CONTROL)
async def finish_weight_update(
    verbs: WeightVerbs, body: Annotated[FinishBody | None, Body()] = None
) -> dict[str, Any]:
    return await verbs.finish(body or FinishBody())


@routes.on("POST", "/abort_weight_update", Access.CONTROL)
async def abort_weight_update(
    verbs: WeightVerbs, body: Annotated[AbortUpdateBody | None, Body()] = None
) -> dict[str, Any]:
    return await verbs.abort(body or AbortUpdateBody())


@routes.on("GET", "/server_info", Access.GENERATION)
async def info(
    rollout: Engine, request: Request, config_format: Literal["json"] = "json"
) -> dict[str, Any]:
    """vLLM's document and SGLang's in one: both have this path, and no field in common."""
    mode = request.app.state.defaults.logprobs_mode
    return {**await sglang_info(rollout), **await server_info_document(rollout, mode)}


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidRequest(message)
