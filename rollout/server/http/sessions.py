"""Sessions over HTTP: what ``X-Session-ID`` on chat completions has gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Query
from starlette.datastructures import Headers

from rollout.api import AsyncRollout, Trajectory
from rollout.api.backend import Outputs
from rollout.errors import InvalidRequest
from rollout.generation import ChatOptions, SamplingParams
from rollout.rpc.convert import Messages
from rollout.server.auth import Access
from rollout.server.http.finite import finite
from rollout.server.http.guard import Engine, Routes
from rollout.server.http.openai.assistant import Message, MessageReader, whole_message
from rollout.server.http.openai.messages import template_messages
from rollout.server.http.parsers import Parse, named, required
from rollout.server.http.responses import SESSION

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
    options: ChatOptions,
    reader: MessageReader,
    parse: Parse | None,
) -> Outputs:
    """Outputs of a chat completion, as a turn of its session where the headers name one.

    ``reader`` is how answers of it are shown, and ``parse`` how the server reads calls that were
    not required: who sends an answer back as it was shown means it.
    """
    name = headers.get(SESSION)
    if name is None:
        return rollout.stream_chat(
            conversation, params, request_ids=[request_id], stream=stream, **options.to_dict()
        )
    restart = headers.get(RESTART, "false").lower()
    if restart not in ("true", "false"):
        raise InvalidRequest(f"X-Session-Restart must be true or false, got {restart!r:.40}")
    held = rollout.sessions.messages(name)
    return rollout.sessions.stream_chat(
        name,
        as_written(conversation, held, reader, parse),
        params,
        request_id=request_id,
        stream=stream,
        restart=restart == "true",
        options=options,
    )


def as_written(
    conversation: Messages,
    held: Sequence[Mapping[str, Any]],
    reader: MessageReader,
    parse: Parse | None,
) -> list[Mapping[str, Any]]:
    """The conversation with answers as the model wrote them where a client sends them parsed."""
    made = list(conversation)
    for number, (theirs, ours) in enumerate(zip(conversation, held, strict=False)):
        if ours["role"] != "assistant" or theirs == ours:
            continue
        opened = ("", *(() if reader.reasoning is None else (reader.reasoning.start,)))
        if any(
            _shows(theirs, way.read(ours["content"], prompt, True))
            for way in _ways(theirs, reader, parse)
            for prompt in opened
        ):
            made[number] = ours
    return made


def _ways(
    theirs: Mapping[str, Any], reader: MessageReader, parse: Parse | None
) -> Iterator[MessageReader]:
    """How the answer may have been read: the ``tool_choice`` of its turn may have been another."""
    yield reader
    for calls in (None, parse, required):
        yield replace(reader, calls=calls)
    for call in theirs.get("tool_calls", ())[:1]:
        yield replace(reader, calls=named(call["function"]["name"]))


def _shows(theirs: Mapping[str, Any], message: Message) -> bool:
    try:
        (shown,) = template_messages([whole_message(message, "")])
    except InvalidRequest:
        return False  # a call whose arguments are no JSON, as one that was cut short
    return _says(theirs) == _says(shown)


def _says(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of an answer a client has to send back: its ids may differ, its thought be left out."""
    calls = [
        (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())
    ]
    return message.get("role"), message["content"], calls


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
        "finish_reasons": trajectory.finish_reasons,
    }
