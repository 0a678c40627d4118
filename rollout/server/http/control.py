"""Control routes and low-level weight verbs for trainers, with vLLM's names and bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from fastapi import Body, Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.config import DEFAULT_TIMEOUT, MAX_TIMEOUT
from rollout.engine.control import PAUSE_MODES
from rollout.errors import InvalidRequest
from rollout.server.auth import Access
from rollout.server.http.control_params import ControlParams
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

B = TypeVar("B", bound=BaseModel)
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT)]  # seconds


class AbortBody(BaseModel):
    """``request_ids`` absent, null or empty: every request, as vLLM has it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    request_ids: list[str] | None = None


class PauseParams(BaseModel):
    """vLLM's default: running requests end with what they have. ``wait_for_inflight_requests`` is
    its older name of the mode "wait".
    """

    mode: str | None = None
    clear_cache: bool = False
    wait_for_inflight_requests: bool = False
    timeout: Timeout = DEFAULT_TIMEOUT

    def pause_mode(self) -> str:
        if self.wait_for_inflight_requests and self.mode not in (None, "wait"):
            raise InvalidRequest(f"wait_for_inflight_requests is mode=wait, not {self.mode!r:.80}")
        mode = "wait" if self.wait_for_inflight_requests else self.mode or "abort"
        _check(mode in PAUSE_MODES, f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        return mode


class SleepParams(BaseModel):
    """``mode``: "keep" freezes running requests, "wait" lets them finish, "abort" ends them."""

    level: int = 1
    mode: str = "keep"
    timeout: Timeout = DEFAULT_TIMEOUT


class WakeParams(BaseModel):
    tags: list[str] | None = None
    timeout: Timeout = DEFAULT_TIMEOUT


class ResetParams(BaseModel):
    """``reset_running_requests``: running requests compute their KV again. ``reset_external``: of
    caches beside the engine, of which there are none.
    """

    reset_running_requests: bool = False
    reset_external: bool = False


routes = Routes()


@routes.on("POST", "/reset_prefix_cache", Access.CONTROL)
async def reset_prefix_cache(
    rollout: Engine, params: Annotated[ResetParams, Depends(ControlParams(ResetParams))]
) -> dict[str, Any]:
    await rollout.reset_prefix_cache(params.reset_running_requests)
    return {"success": True}


@routes.on("POST", "/abort_requests", Access.CONTROL)
@routes.on("POST", "/inference/v1/abort_requests", Access.CONTROL)
async def abort_requests(rollout: Engine, body: AbortBody | None = None) -> dict[str, Any]:
    ids = body.request_ids if body else None
    return {"aborted": await rollout.abort(ids or None)}


@routes.on("POST", "/pause", Access.CONTROL)
async def pause(
    rollout: Engine, params: Annotated[PauseParams, Depends(ControlParams(PauseParams))]
) -> dict[str, Any]:
    await rollout.pause_generation(params.pause_mode(), params.timeout)
    if params.clear_cache:
        await rollout.reset_prefix_cache()
    return {"status": "paused"}


@routes.on("POST", "/resume", Access.CONTROL)
async def resume(rollout: Engine) -> dict[str, Any]:
    await rollout.resume_generation()
    return {"status": "resumed"}


@routes.on("GET", "/is_paused", Access.GENERATION)
async def is_paused(rollout: Engine) -> dict[str, Any]:
    return {"is_paused": (await rollout.metrics()).paused}


@routes.on("POST", "/sleep", Access.CONTROL)
async def sleep(
    rollout: Engine, params: Annotated[SleepParams, Depends(ControlParams(SleepParams))]
) -> dict[str, Any]:
    _check(params.level in (1, 2), f"level must be 1 or 2, got {params.level}")
    await rollout.sleep(params.level, params.mode, params.timeout)
    return {"status": "asleep", "level": params.level}


@routes.on("POST", "/wake_up", Access.CONTROL)
async def wake_up(
    rollout: Engine, params: Annotated[WakeParams, Depends(ControlParams(WakeParams))]
) -> dict[str, Any]:
    await rollout.wake_up(params.tags, params.timeout)
    return {"status": "awake"}


@routes.on("GET", "/is_sleeping", Access.GENERATION)
async def is_sleeping(rollout: Engine) -> dict[str, Any]:
    return {"is_sleeping": (await rollout.metrics()).state == "asleep"}


@routes.on("GET", "/weight_info", Access.GENERATION)
async def weight_info(rollout: Engine) -> dict[str, Any]:
    return weight_info_document(await rollout.weight_info())


@routes.on("GET", "/get_world_size", Access.GENERATION)
async def get_world_size(rollout: Engine, include_dp: bool = True) -> dict[str, Any]:
    """``include_dp`` (vLLM's) changes nothing: an engine has no data-parallel ranks."""
    info = await rollout.weight_info()
    return {"world_size": info.num_ranks}


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
    rollout: Engine, verbs: WeightVerbs, body: dict[str, Any]
) -> dict[str, Any]:
    """vLLM's broadcast, or prime-rl's directory."""
    if "weight_dir" in body:
        return await update_from_directory(rollout, _read(WeightDirBody, body))
    if "update_info" not in body:
        raise InvalidRequest(
            "the body has no update_info (of a broadcast, as vLLM has it), and no weight_dir (of "
            "a directory under a --weight-dir)"
        )
    return await verbs.update(_read(UpdateBody, body))


@routes.on("POST", "/fetch_weights", Access.CONTROL)
async def fetch_weights(body: Annotated[Any, Body()] = None) -> dict[str, Any]:
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


def _read(kind: type[B], body: dict[str, Any]) -> B:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidRequest(message)
