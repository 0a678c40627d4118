"""Sessions over HTTP: what ``X-Session-ID`` on chat completions has gathered."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from starlette.datastructures import Headers

from rollout.api import AsyncRollout, Trajectory
from rollout.api.backend import Outputs
from rollout.errors import InvalidRequest
from rollout.generation import SamplingParams
from rollout.rpc.convert import Messages
from rollout.server.auth import Access
from rollout.server.http.answers import finite
from rollout.server.http.guard import Engine, Routes

SESSION = "x-session-id"
RESTART = "x-session-restart"  # "true": tokenise the whole conversation, edited answers included
SessionId = Annotated[str, Query(min_length=1)]

routes = Routes()


def chat_outputs(
    rollout: AsyncRollout,
    headers: Headers,
    conversation: Messages,
    params: SamplingParams,
    request_id: str,
    *,
    stream: bool,
) -> Outputs:
    """Outputs of a chat completion, as a turn of its session where the headers name one."""
    name = headers.get(SESSION)
    if name is None:
        return rollout.stream_chat(conversation, params, request_ids=[request_id], stream=stream)
    restart = headers.get(RESTART, "false").lower()
    if restart not in ("true", "false"):
        raise InvalidRequest(f"X-Session-Restart must be true or false, got {restart!r:.40}")
    return rollout.sessions.stream_chat(
        name,
        conversation,
        params,
        request_id=request_id,
        stream=stream,
        restart=restart == "true",
    )


@routes.on("GET", "/session", Access.GENERATION)
async def session(rollout: Engine, session_id: SessionId) -> dict[str, Any]:
    """The whole conversation as arrays for a trainer; see ``Trajectory``."""
    held = rollout.sessions.get(session_id)
    return {"session_id": session_id, **_plain(held.trajectory()), "messages": held.messages}


@routes.on("DELETE", "/session", Access.GENERATION)
async def end_session(rollout: Engine, session_id: SessionId) -> dict[str, Any]:
    """Forget it; ``ended`` false where it was not there (any more)."""
    return {"session_id": session_id, "ended": rollout.sessions.end(session_id)}


def _plain(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "prompt_token_ids": trajectory.prompt_token_ids.tolist(),
        "token_ids": trajectory.token_ids.tolist(),
        "mask": trajectory.mask.int().tolist(),
        "raw_logprobs": [finite(p) for p in trajectory.raw_logprobs.tolist()],
        "processed_logprobs": [finite(p) for p in trajectory.processed_logprobs.tolist()],
        "log_kept_mass": [finite(p) for p in trajectory.log_kept_mass.tolist()],
        "weight_versions": trajectory.weight_versions.tolist(),
        "epoch": trajectory.epoch,
    }
