"""HTTP routes of the low-level weight verbs, with vLLM's names and bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body

from rollout.api import AsyncRollout
from rollout.server.verbs import (
    AbortBody,
    FinishBody,
    InitBody,
    StartBody,
    UpdateBody,
    Verbs,
    server_info,
)


def verb_routes(rollout: AsyncRollout, logprobs_mode: str) -> APIRouter:
    """``logprobs_mode``: of requests that name none, as trainers ask for it."""
    router, verbs = APIRouter(), Verbs(rollout)

    @router.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(body: InitBody) -> dict[str, Any]:
        return await verbs.init(body)

    @router.post("/start_weight_update")
    async def start_weight_update(
        body: Annotated[StartBody | None, Body()] = None,
    ) -> dict[str, Any]:
        return await verbs.start(body or StartBody())

    @router.post("/update_weights")
    async def update_weights(body: UpdateBody) -> dict[str, Any]:
        return await verbs.update(body)

    @router.post("/finish_weight_update")
    async def finish_weight_update(
        body: Annotated[FinishBody | None, Body()] = None,
    ) -> dict[str, Any]:
        return await verbs.finish(body or FinishBody())

    @router.post("/abort_weight_update")
    async def abort_weight_update(
        body: Annotated[AbortBody | None, Body()] = None,
    ) -> dict[str, Any]:
        return await verbs.abort(body or AbortBody())

    @router.get("/server_info")
    async def info(config_format: Literal["json"] = "json") -> dict[str, Any]:
        return await server_info(rollout, logprobs_mode)

    return router
