"""The HTTP face of an engine: OpenAI's completions and chat, health, metrics and control."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Collection
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from rollout.api import AsyncRollout
from rollout.api.backend import Outputs
from rollout.api.generation_verbs import in_order
from rollout.errors import EngineError, InvalidRequest, RolloutError
from rollout.generation import RequestOutput, SamplingParams
from rollout.rpc.http_port import GRPC_PORT
from rollout.rpc.status import MAX_BODY
from rollout.server.auth import Access, Tokens
from rollout.server.grpc.health import ENDED, SERVING, state_of
from rollout.server.http import (
    adapters,
    classify,
    control,
    dashboard,
    fleet,
    score,
    sessions,
    sglang,
    tinker,
    vllm,
)
from rollout.server.http.dialect import Dialect, shapes_of
from rollout.server.http.errors import error_body, install_error_handlers
from rollout.server.http.guard import Engine, Guard, Routes, include
from rollout.server.http.json_response import JSONResponse
from rollout.server.http.openai import embeddings
from rollout.server.http.openai.answer_defaults import AnswerDefaults
from rollout.server.http.openai.answers import (
    AnswerStyle,
    Stream,
    TokenText,
    answer,
    token_id_text,
    with_top,
)
from rollout.server.http.openai.assistant import MessageReader
from rollout.server.http.openai.chat_body import ChatBody, TokenizeBody
from rollout.server.http.openai.grammars import after_thought
from rollout.server.http.openai.messages import template_messages
from rollout.server.http.openai.responses_api import ResponseAnswer, chat_of
from rollout.server.http.openai.types import (
    CompletionBody,
    SamplingBody,
)
from rollout.server.http.responses import (
    EventStream,
    adapter_names,
    decoder_of,
    event,
    first_of,
    in_session,
    sampled_by,
    served_model,
    unless_disconnected,
    within,
)
from rollout.server.metrics import render

routes = Routes()
DIALECTS = (
    Dialect(name="openai", routes=routes),
    Dialect(name="embeddings", routes=embeddings.routes),
    Dialect(name="classify", routes=classify.routes),
    Dialect(name="score", routes=score.routes),
    Dialect(name="sessions", routes=sessions.routes),
    Dialect(name="vllm", routes=control.routes),
    Dialect(name="vllm-frameworks", routes=vllm.routes),
    Dialect(name="adapters", routes=adapters.routes),
    Dialect(name="sglang", routes=sglang.routes, error=sglang.sglang_error),
    Dialect(name="tinker", routes=tinker.routes, error=tinker.tinker_error),
    Dialect(name="fleet", routes=fleet.routes),
    Dialect(name="dashboard", routes=dashboard.routes),
)


def build_app(
    rollout: AsyncRollout,
    *,
    tokens: Tokens | None = None,
    token_text: TokenText | None = None,
    answers: AnswerDefaults | None = None,
    max_body_bytes: int = MAX_BODY,
    open_routes: Collection[str] | None = None,
) -> FastAPI:
    """An ASGI application over ``rollout``; it owns nothing, starts nothing and ends nothing.

    Until ``rollout`` has started, ``/health`` says so and everything else is a 503.

    ``token_text`` names one token id in OpenAI's logprobs; without it they read ``token_id:N``.
    ``answers``: what requests get that do not say.
    ``open_routes``: these alone answer, and ask for no token.
    """
    app = FastAPI(title="rollout", docs_url=None, redoc_url=None, openapi_url=None)
    shapes = shapes_of(DIALECTS)
    install_error_handlers(app, shapes)
    app.add_middleware(
        Guard,
        tokens=tokens or Tokens(),
        max_body_bytes=max_body_bytes,
        open_routes=open_routes,
        loading=lambda: _loading(rollout),
        shapes=shapes,
    )
    app.state.rollout, app.state.grpc_port = rollout, ""  # its gRPC port, once it has one
    app.state.defaults = answers or AnswerDefaults()
    app.state.token_text = token_text or token_id_text
    for dialect in DIALECTS:
        include(app, dialect.routes)
    return app


def _loading(rollout: AsyncRollout) -> str:
    if not rollout.backend.is_loading:
        return ""
    return rollout.backend.waits_for or "the engine is loading: ask /health"


@routes.on("GET", "/health", Access.OPEN)
@routes.on("GET", "/ping", Access.OPEN)
async def health(rollout: Engine, request: Request) -> Response:
    """Readiness: 200 if a request that came now would be served, else 503.

    ``prepared``: the update that waits for a decision, if one does. A header tells a gRPC client
    that has come here which port it should have asked.
    """
    state = await state_of(rollout)
    prepared = rollout.backend.prepared
    body = {"status": state, **({"prepared": prepared} if prepared else {})}
    port = request.app.state.grpc_port
    return JSONResponse(body, 200 if state == SERVING else 503, {GRPC_PORT: port} if port else None)


@routes.on("GET", "/live", Access.OPEN)
async def live(rollout: Engine) -> Response:
    """Liveness: 503 when only a restart helps; 200 also while loading, paused or asleep."""
    state = await state_of(rollout)
    return JSONResponse({"status": state}, 503 if state in ENDED else 200)


@routes.on("GET", "/metrics", Access.GENERATION)
async def metrics(rollout: Engine) -> Response:
    """A fleet of which no member serves has figures of its members alone."""
    served = rollout.backend.served
    members = None if served is None or served.fleet is None else served.fleet.members()
    info, stats = await rollout.server_info(), None
    try:
        stats = await rollout.metrics()
    except EngineError:
        if members is None:
            raise
    text = render(stats, info.model, members)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@routes.on("GET", "/load", Access.GENERATION)
async def load(rollout: Engine) -> dict[str, int]:
    """vLLM's figure for routers: requests that run or wait."""
    stats = await rollout.metrics()
    return {"server_load": stats.running + stats.waiting}


@routes.on("GET", "/v1/models", Access.GENERATION)
async def models(rollout: Engine) -> dict[str, Any]:
    return {"object": "list", "data": await _cards(rollout)}


@routes.on("GET", "/v1/models/{model:path}", Access.GENERATION)
async def one_model(rollout: Engine, model: str) -> dict[str, Any]:
    """The model, or an adapter by the names that requests may give it; hub ids have slashes."""
    if not model:  # of a trailing slash
        return {"object": "list", "data": await _cards(rollout)}
    await served_model(rollout, model)
    base, *adapters = await _cards(rollout)
    name = model.removeprefix(f"{base['id']}:")
    return next((card for card in adapters if card["id"] == name), base)


async def _cards(rollout: AsyncRollout) -> list[dict[str, Any]]:
    """The model's, then those of its adapters."""
    info = await rollout.server_info()
    card = {
        "id": info.model,
        "object": "model",
        "created": 0,
        "owned_by": "rollout",
        "root": info.model,
        "max_model_len": info.max_model_len,
    }
    more = [{**card, "id": name, "parent": info.model} for name in adapter_names(rollout)]
    return [card, *more]


@routes.on("GET", "/version", Access.GENERATION)
async def version(rollout: Engine) -> dict[str, str]:
    return {"version": (await rollout.server_info()).package_version}


@routes.on("POST", "/v1/completions", Access.GENERATION)
async def completions(rollout: Engine, body: CompletionBody, request: Request) -> Response:
    prompts, defaults = body.prompts(), request.app.state.defaults
    params = in_session(defaults.asked(body.sampling()), request.headers)
    model, params = await sampled_by(rollout, body.model, params)
    style = replace(
        _style(body, params, model, request, chat=False),
        echo=prompts if body.echo else (),
        decode=decoder_of(rollout),
        answerless=body.answerless,
    )
    params = _processed(params, style)
    if not body.add_special_tokens:
        prompts = [
            await rollout.tokenize(p, add_special_tokens=False) if isinstance(p, str) else p
            for p in prompts
        ]
    outputs = rollout.stream_many(prompts, params, request_ids=style.request_id, stream=body.stream)
    outputs = within(body.timeout, rollout, params, outputs)
    return await _respond(request, body, style, outputs)


@routes.on("POST", "/v1/chat/completions", Access.GENERATION)
async def chat(rollout: Engine, body: ChatBody, request: Request) -> Response:
    reader, params = _read_by(rollout, body, request)
    model, params = await sampled_by(rollout, body.model, params)
    style = replace(_style(body, params, model, request, chat=True), reader=reader)
    params = _processed(params, style)
    outputs = await _chat_outputs(rollout, body, request, reader, params, style.request_id)
    return await _respond(request, body, style, outputs)


@routes.on("POST", "/v1/responses", Access.GENERATION)
async def responses(rollout: Engine, body: dict[str, Any], request: Request) -> Response:
    asked = chat_of(body)
    if asked.n != 1:
        raise InvalidRequest("a response is one sample: n must be 1")
    reader, params = _read_by(rollout, asked, request)
    model, params = await sampled_by(rollout, asked.model, params)
    made = ResponseAnswer(body, model, reader)
    outputs = await _chat_outputs(rollout, asked, request, reader, params, made.id)
    if not asked.stream:
        done = await unless_disconnected(request, in_order(outputs))
        return JSONResponse(made.whole(done[0]))
    first = await unless_disconnected(request, first_of(outputs))
    return EventStream(made.stream(first, outputs))


def _read_by(
    rollout: AsyncRollout, body: ChatBody, request: Request
) -> tuple[MessageReader, SamplingParams]:
    """How a chat's answer is read here, and sampled for that."""
    defaults: AnswerDefaults = request.app.state.defaults
    reader = body.reader(defaults.tools, defaults.reasoning)
    reader = replace(reader, decode=decoder_of(rollout))
    params = defaults.asked(body.sampling(keep_special=reader.special))
    return reader, in_session(params, request.headers)


async def _chat_outputs(
    rollout: AsyncRollout,
    body: ChatBody,
    request: Request,
    reader: MessageReader,
    params: SamplingParams,
    request_id: str,
) -> Outputs:
    conversation, options = body.conversation(), body.chat_options()
    if params.structured_outputs is not None and reader.reasoning is not None:
        prompt = await rollout.backend.render(conversation, options)
        grammar = after_thought(params.structured_outputs, reader.reasoning, prompt)
        params = replace(params, structured_outputs=grammar)
    tools = request.app.state.defaults.tools
    outputs = sessions.chat_outputs(
        rollout,
        request.headers,
        conversation,
        params,
        request_id,
        stream=body.stream,
        options=options,
        reader=reader,
        parse=None if tools is None else tools.parse,
    )
    return within(body.timeout, rollout, params, outputs)


@routes.on("POST", "/tokenize", Access.GENERATION)
async def tokenize(rollout: Engine, body: TokenizeBody) -> dict[str, Any]:
    await served_model(rollout, body.model)
    prompt = body.prompt if body.prompt is not None else template_messages(body.messages or [])
    options = body.options().to_dict()
    ids = await rollout.tokenize(prompt, add_special_tokens=body.add_special_tokens, **options)
    limit = (await rollout.server_info()).max_model_len
    return {"tokens": ids, "count": len(ids), "max_model_len": limit}


def _style(
    body: SamplingBody,
    params: SamplingParams,
    model: str,
    request: Request,
    *,
    chat: bool,
) -> AnswerStyle:
    state = request.app.state
    prefix = "chatcmpl" if chat else "cmpl"
    return AnswerStyle(
        model=model,
        chat=chat,
        samples=body.n,
        logprobs=params.logprobs is not None,
        top=params.logprobs or 0,
        processed=(body.logprobs_mode or state.defaults.logprobs_mode) == "processed_logprobs",
        token_ids=body.return_token_ids,
        token_text=token_id_text if body.return_tokens_as_token_ids else state.token_text,
        request_id=body.request_id or f"{prefix}-{uuid.uuid4().hex}",
        role=state.defaults.response_role,
    )


def _processed(params: SamplingParams, style: AnswerStyle) -> SamplingParams:
    """Where logprobs are processed, vLLM's alternatives are, too, and the prompt's."""
    if not style.processed:
        return params
    at = 1.0 if params.greedy else params.temperature
    return replace(with_top(params, "processed"), prompt_temperature=at)


async def _respond(
    request: Request, body: SamplingBody, style: AnswerStyle, outputs: Outputs
) -> Response:
    if not body.stream:
        done = await unless_disconnected(request, in_order(outputs))
        return JSONResponse(answer(done, style))
    # The first output is awaited here, so that a refused request is an HTTP error, not a stream.
    first = await unless_disconnected(request, first_of(outputs))
    options = body.stream_options
    wants_usage = options is not None and options.include_usage
    always = wants_usage and options is not None and options.continuous_usage_stats
    events = _events(first, outputs, Stream(style, usage_always=always), wants_usage)
    return EventStream(events)


async def _events(
    first: tuple[int, RequestOutput], outputs: Outputs, stream: Stream, wants_usage: bool
) -> AsyncGenerator[str]:
    """Server-sent events; an error after the first output becomes an event and ends the stream."""
    async with contextlib.aclosing(outputs):
        try:
            for each in stream.events(*first):
                yield each
            async for index, output in outputs:
                for each in stream.events(index, output):
                    yield each
        except RolloutError as error:
            yield event(error_body(error)[0])
        else:
            if wants_usage:
                yield event(stream.usage_chunk())
        yield "data: [DONE]\n\n"
