"""Tinker's dialect: what its SDK (0.38) sends to sample; training it does elsewhere.

    create_session -> create_sampling_session -> asample ... -> retrieve_future ...

A sampling session samples with what is live, now or newer (Tinker's "inflight"). Tinker's contract
does not say which weights made a token; ``GET /api/v1/weight_versions`` does, by the
``sequence_id`` that the SDK has of each sample.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from rollout.errors import InvalidRequest
from rollout.generation import SamplingParams
from rollout.server.auth import Access
from rollout.server.http.guard import Engine, Routes
from rollout.server.http.json_response import JSONResponse
from rollout.server.http.openai.answer_defaults import AnswerDefaults
from rollout.server.http.openai.answers import with_top
from rollout.server.http.responses import sampled_by
from rollout.server.http.tinker_futures import Failed, SampleFutures, Wanted

routes = Routes()
Document = dict[str, Any]
PROTOBUF = "application/x-protobuf"
LONG_POLL = 20.0  # seconds; the SDK gives a request 45
TokenIds = list[Annotated[int, Field(ge=0)]]
SequenceId = Annotated[str, Query(min_length=1)]


class _Body(BaseModel):
    """Fields that mean nothing to sampling are taken without effect."""

    model_config = ConfigDict(extra="ignore")


class SessionBody(_Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class JoinBody(_Body):
    sampling_session_id: str


class Chunk(_Body):
    type: str = "encoded_text"
    tokens: TokenIds = []


class Prompt(_Body):
    chunks: list[Chunk]


class Sampling(_Body):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(_Body):
    """``/api/v1/asample``: of a sampling session by number, or of the model alone."""

    prompt: Prompt
    sampling_params: Sampling
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0

    def token_ids(self) -> list[int]:
        ids: list[int] = []
        for number, chunk in enumerate(self.prompt.chunks):
            if chunk.type != "encoded_text":
                raise InvalidRequest(f"prompt chunk {number} is {chunk.type!r}, not tokens")
            ids += chunk.tokens
        return ids

    def params(self) -> SamplingParams:
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is not served here: leave it out")
        asked = self.sampling_params
        stop = asked.stop
        texts = [stop] if isinstance(stop, str) else [s for s in stop or () if isinstance(s, str)]
        tokens = [t for t in stop or () if isinstance(t, int)]
        wanted = self.prompt_logprobs or self.topk_prompt_logprobs
        count, last = len(self.token_ids()), self.prompt_logprobs_last_n
        return SamplingParams(
            n=self.num_samples, max_tokens=asked.max_tokens, seed=asked.seed,
            temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p,
            stop=tuple(texts), stop_token_ids=tuple(tokens), ignore_eos=stop == [],
            prompt_logprobs=self.topk_prompt_logprobs if wanted else None,
            prompt_logprobs_start=max(count - last, 0) if wanted and last else 0,
            logprobs=self.topk_sample_logprobs,
        )  # fmt: skip


class FutureBody(_Body):
    request_id: str


def tinker_error(path: str, message: str, kind: str, status: int) -> tuple[Document, int]:
    return {"detail": message, "error": {"message": message, "type": kind}}, status


# ---- sessions: names alone, nothing is kept of them ----


@routes.on("GET", "/api/v1/healthz", Access.OPEN)
async def healthz() -> Document:
    return {"status": "ok"}


@routes.on("POST", "/api/v1/client/config", Access.GENERATION)
async def client_config() -> Document:
    """httpx's own transport: its HTTP/1.1 is what this server speaks."""
    return {"use_pyqwest_transport": False}


@routes.on("POST", "/api/v1/client/dynamic_config", Access.GENERATION)
async def dynamic_config() -> Document:
    return {"sample_cancel_enabled": True}


@routes.on("GET", "/api/v1/get_server_capabilities", Access.GENERATION)
async def capabilities(rollout: Engine) -> Document:
    info = await rollout.server_info()
    model = {"model_name": info.model, "max_context_length": info.max_model_len}
    return {"supported_models": [model | {"trainable": False, "sampleable": True}]}


@routes.on("POST", "/api/v1/create_session", Access.GENERATION)
async def create_session() -> Document:
    return {"type": "create_session", "session_id": uuid.uuid4().hex}


@routes.on("POST", "/api/v1/session_heartbeat", Access.GENERATION)
async def session_heartbeat() -> Document:
    return {"type": "session_heartbeat"}


@routes.on("POST", "/api/v1/telemetry", Access.GENERATION)
async def telemetry() -> Document:
    """Of nobody's interest here, and dropped."""
    return {"status": "accepted"}


@routes.on("POST", "/api/v1/create_sampling_session", Access.GENERATION)
async def create_sampling_session(rollout: Engine, body: SessionBody) -> Document:
    _no_path(body.model_path)
    _, params = await sampled_by(rollout, body.base_model, SamplingParams())
    if params.adapter is not None:
        raise InvalidRequest("sessions are of the base model: name the adapter in each sample")
    name = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
    return {"type": "create_sampling_session", "sampling_session_id": name}


@routes.on("POST", "/api/v1/join_sampling_session", Access.GENERATION)
async def join_sampling_session(body: JoinBody) -> Document:
    """A number that no other clone of the session has: of 52 random bits."""
    counter = (uuid.uuid4().int >> 76) | 1
    return {"type": "join_sampling_session", "client_counter": counter}


# ---- samples ----


@routes.on("POST", "/api/v1/asample", Access.GENERATION)
async def asample(rollout: Engine, body: SampleBody, request: Request) -> Document:
    """Begins a sample; sent again under its session and number it is the one that has begun."""
    _no_path(body.model_path)
    _, params = await sampled_by(rollout, body.base_model, body.params())
    defaults: AnswerDefaults = request.app.state.defaults
    processed = defaults.logprobs_mode == "processed_logprobs"
    if processed:
        params = with_top(params, "processed")
    wanted = Wanted(
        params=params,
        prompt_logprobs=bool(body.prompt_logprobs),
        last=body.prompt_logprobs_last_n,
        processed=processed,
    )
    named = body.sampling_session_id is not None and body.seq_id is not None
    request_id = f"{body.sampling_session_id}:{body.seq_id}" if named else uuid.uuid4().hex
    ids = await _futures(request).begin(rollout, request_id, body.token_ids(), wanted)
    return {"request_id": request_id, "sample_sequence_ids": ids}


@routes.on("POST", "/api/v1/retrieve_future", Access.GENERATION)
async def retrieve_future(body: FutureBody, request: Request) -> Response:
    """The sample as protobuf, word that it goes on, or why it failed."""
    futures = _futures(request)
    if body.request_id not in futures:
        told = f"{body.request_id} was never begun here, or has been forgotten: sample again"
        return JSONResponse(*tinker_error("", told, "NotFoundError", 410))
    done = await futures.wait(body.request_id, LONG_POLL)
    if done is None:
        more = {"request_id": body.request_id, "queue_state": "active"}
        return JSONResponse({"type": "try_again", **more})
    if isinstance(done, Failed):
        return JSONResponse({"error": done.message, "category": done.category})
    return Response(done, media_type=PROTOBUF)


@routes.on("POST", "/api/v1/cancel_future", Access.GENERATION)
async def cancel_future(body: FutureBody, request: Request) -> Document:
    return {"request_id": body.request_id, "cancelled": _futures(request).cancel(body.request_id)}


@routes.on("GET", "/api/v1/weight_versions", Access.GENERATION)
async def weight_versions(sequence_id: SequenceId, request: Request) -> Response:
    """What Tinker lacks: the version of the weights that made each token of a sample."""
    found = _futures(request).versions(sequence_id)
    if found is None:
        told = f"no sample {sequence_id!r} has ended here, or it has been forgotten"
        return JSONResponse(*tinker_error("", told, "NotFoundError", 404))
    epoch, spans = found
    each = [span.version for span in spans for _ in range(span.start, span.stop)]
    rows = [asdict(span) for span in spans]
    return JSONResponse(
        {"sequence_id": sequence_id, "epoch": epoch, "versions": each, "spans": rows}
    )


def _no_path(path: str | None) -> None:
    if path is not None:
        raise InvalidRequest(
            f"model_path {path!r} is not served: this server samples with what is live; leave it "
            "out, and give base_model"
        )


def _futures(request: Request) -> SampleFutures:
    """One store for each application: what began at one address is asked for there."""
    state = request.app.state
    if not hasattr(state, "tinker_futures"):
        state.tinker_futures = SampleFutures()
    futures: SampleFutures = state.tinker_futures
    return futures
