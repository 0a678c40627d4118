"""SGLang's dialect: the routes and bodies that its clients send (AReaL, slime, miles, SkyRL).

Weights go through the same verbs as everybody's. SGLang's older flow has neither a start nor a
finish: the call that completes the model commits, and ``/continue_generation`` refuses to go on
with an update that was left incomplete. ``/begin_weight_update`` and ``/end_weight_update`` say so
themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from rollout.api import AsyncRollout
from rollout.api.backend import Outputs
from rollout.api.generation_verbs import in_order
from rollout.errors import EngineError, RolloutError
from rollout.generation import NAN_LOGITS, RequestOutput, SamplingParams, classify_params
from rollout.server.auth import Access
from rollout.server.grpc.health import SERVING, state_of
from rollout.server.http.errors import error_body
from rollout.server.http.guard import Engine, Routes
from rollout.server.http.json_response import JSONResponse
from rollout.server.http.openai.answers import TokenText
from rollout.server.http.responses import (
    EventStream,
    event,
    first_of,
    in_session,
    unless_disconnected,
)
from rollout.server.http.sglang_types import NOT_NUMBERS, Ask, GenerateBody, Versions, replies
from rollout.server.sglang_verbs import (
    AbortBody,
    CheckBody,
    DestroyGroupBody,
    DiskBody,
    DistributedBody,
    InitGroupBody,
    MemoryBody,
    NoBody,
    PauseBody,
    SglangVerbs,
    TensorBody,
    VersionBody,
    load_of,
    server_info,
)

routes = Routes()
GENERATE = "/generate"
_KEPT = (401, 403, 404, 405, 413)  # statuses of requests that no verb has seen
HEALTH_LIMIT = 20.0  # seconds for one token
Document = dict[str, Any]


def sglang_error(path: str, message: str, kind: str, status: int) -> tuple[Document, int]:
    """SGLang's shapes: a refused verb is a 400 with ``success`` false, whatever its reason."""
    if path in _SAID and status not in _KEPT:
        return {"success": False, "message": message}, 400
    if path == GENERATE:
        return {"error": {"message": message, "type": kind, "code": status}}, status
    shape = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return shape, status


# ---- generation ----


@routes.on("POST", GENERATE, Access.GENERATION)
async def generate(rollout: Engine, body: GenerateBody, request: Request) -> Response:
    asks = body.asks()
    answer = _Answer(rollout, body, asks, request.app.state.token_text)
    outputs = rollout.stream_many(
        [ask.prompt for ask in asks],
        [in_session(ask.params, request.headers) for ask in asks],
        request_ids=[ask.rid for ask in asks],
        stream=body.stream,
    )
    if not body.stream:
        done = await unless_disconnected(request, in_order(outputs))
        if not answer.several and done[0].outputs[0].stop_reason == NAN_LOGITS:
            # As SGLang answers what its engine gave up: upon "abort" AReaL asks for the rest.
            raise EngineError(f"the sample ended early: {NOT_NUMBERS}")
        rows = [
            row for index, output in enumerate(done) for row in await answer.rows(index, output)
        ]
        return JSONResponse(rows if answer.several else rows[0])
    first = await unless_disconnected(request, first_of(outputs))
    return EventStream(_events(answer, first, outputs))


class _Answer:
    """Makes the documents of one call."""

    def __init__(
        self, rollout: AsyncRollout, body: GenerateBody, asks: list[Ask], text: TokenText
    ) -> None:
        self._rollout, self._asks = rollout, asks
        self._text = text if body.return_text_in_logprobs else None
        self._prompt_ids = body.return_prompt_token_ids
        self._began = time.monotonic()
        self._labels: dict[int, str | None] = {}  # of versions that were asked for
        self.several = body.is_batch or asks[0].params.n > 1

    async def rows(self, index: int, output: Any) -> list[Document]:
        """Those of prompt number ``index``, one for each sample."""
        versions = await self._versions(output)
        rows = list(replies(output, self._asks[index], versions, self._text))
        for row in rows:
            row["meta_info"]["e2e_latency"] = time.monotonic() - self._began
            if self._prompt_ids:
                row["prompt_token_ids"] = output.prompt_token_ids
        return rows

    async def _versions(self, output: RequestOutput) -> Versions:
        """By their numbers where nobody says the label, as at a front without a serving member."""
        try:
            info = await self._rollout.weight_info()
            self._labels[info.version] = info.label
            spans = (s for c in output.outputs for s in (*c.weight_versions, *c.kv_spans))
            if unknown := {span.version for span in spans} - self._labels.keys():
                said = {one.version: one.label for one in await self._rollout.receipts()}
                self._labels |= {version: said.get(version) for version in unknown}
        except EngineError:
            return Versions(live=(await self._rollout.server_info()).version, labels={})
        return Versions(live=info.version, labels=self._labels)

    def number(self, prompt: int, sample: int) -> int:
        """The place of a sample in the list of answers."""
        return sum(ask.params.n for ask in self._asks[:prompt]) + sample


async def _events(answer: _Answer, first: tuple[int, Any], outputs: Outputs) -> AsyncGenerator[str]:
    """Whole documents that grow, as SGLang streams unless it was started to send increments."""
    async with contextlib.aclosing(outputs):
        try:
            item: tuple[int, Any] | None = first
            while item is not None:
                for sample, row in enumerate(await answer.rows(*item)):
                    more = {"index": answer.number(item[0], sample)} if answer.several else {}
                    yield event(row | more)
                item = await anext(outputs, None)
        except RolloutError as error:
            found, status = error_body(error)
            told = found["error"]
            yield event(sglang_error(GENERATE, told["message"], told["type"], status)[0])
        yield "data: [DONE]\n\n"


@routes.on("POST", "/abort_request", Access.CONTROL)
async def abort_request(rollout: Engine, body: AbortBody) -> Response:
    await rollout.abort(None if body.abort_all else [body.rid])
    return Response(status_code=200)


# ---- what there is ----


@routes.on("GET", "/health_generate", Access.GENERATION)
async def health_generate(rollout: Engine) -> Response:
    """200 once a token was made, or a prompt was classified."""
    if await state_of(rollout) != SERVING:
        return Response(status_code=503)
    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    if (await rollout.server_info()).task == "classify":
        one = classify_params("last")
    try:
        await asyncio.wait_for(rollout.generate([0], one), HEALTH_LIMIT)
    except (TimeoutError, RolloutError):
        return Response(status_code=503)
    return Response(status_code=200)


@routes.on("GET", "/v1/loads", Access.GENERATION)
async def loads(rollout: Engine) -> Document:
    """slime aborts until there are none. ``include`` and ``dp_rank`` (SGLang's) change nothing."""
    stats = await rollout.metrics()
    version = (await rollout.server_info()).package_version
    return {"version": version, "loads": [{"dp_rank": 0, **load_of(stats)}]}


@routes.on("GET", "/get_server_info", Access.GENERATION)
async def get_server_info(rollout: Engine) -> Document:
    return await server_info(rollout)


@routes.on("GET", "/model_info", Access.GENERATION)
@routes.on("GET", "/get_model_info", Access.GENERATION)
async def model_info(rollout: Engine) -> Document:
    info, weights = await rollout.server_info(), await rollout.weight_info()
    return {
        "model_path": info.model,
        "served_model_name": info.model,
        "tokenizer_path": info.model if info.has_tokenizer else None,
        "is_generation": info.task != "classify",
        "preferred_sampling_params": None,
        "weight_version": weights.label or str(weights.version),
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


@routes.on("GET", "/get_weight_version", Access.GENERATION)
async def get_weight_version(rollout: Engine) -> Document:
    info = await rollout.weight_info()
    return {"weight_version": info.label or str(info.version)}


# ---- control ----


@routes.on("POST", "/pause_generation", Access.CONTROL)
async def pause_generation(rollout: Engine, body: PauseBody | None = None) -> Document:
    await SglangVerbs(rollout).pause(body or PauseBody())
    return {"message": "Generation paused successfully.", "status": "ok"}


@routes.on("POST", "/continue_generation", Access.CONTROL)
async def continue_generation(rollout: Engine, body: NoBody | None = None) -> Document:
    await SglangVerbs(rollout).resume()
    return {"message": "Generation continued successfully.", "status": "ok"}


@routes.on("GET", "/flush_cache", Access.CONTROL)
@routes.on("POST", "/flush_cache", Access.CONTROL)
async def flush_cache(rollout: Engine, timeout: float | None = None) -> Response:
    """``timeout`` (SGLang's, until it is idle) is taken without effect: nothing is waited for."""
    await rollout.reset_prefix_cache()
    return Response("Cache flushed.\n", media_type="text/plain")


@routes.on("GET", "/release_memory_occupation", Access.CONTROL)
@routes.on("POST", "/release_memory_occupation", Access.CONTROL)
async def release_memory_occupation(rollout: Engine, body: MemoryBody | None = None) -> None:
    await SglangVerbs(rollout).release(body or MemoryBody())


@routes.on("GET", "/resume_memory_occupation", Access.CONTROL)
@routes.on("POST", "/resume_memory_occupation", Access.CONTROL)
async def resume_memory_occupation(rollout: Engine, body: MemoryBody | None = None) -> None:
    await SglangVerbs(rollout).regain(body or MemoryBody())


# ---- weights ----


@routes.on("POST", "/update_weights_from_disk", Access.CONTROL)
async def update_weights_from_disk(rollout: Engine, body: DiskBody) -> Document:
    return await SglangVerbs(rollout).from_disk(body)


@routes.on("POST", "/update_weights_from_tensor", Access.CONTROL)
async def update_weights_from_tensor(rollout: Engine, body: TensorBody) -> Document:
    return await SglangVerbs(rollout).from_tensor(body)


@routes.on("POST", "/update_weight_version", Access.CONTROL)
async def update_weight_version(rollout: Engine, body: VersionBody) -> Document:
    return await SglangVerbs(rollout).relabel(body)


@routes.on("POST", "/init_weights_update_group", Access.CONTROL)
async def init_weights_update_group(rollout: Engine, body: InitGroupBody) -> Document:
    return await SglangVerbs(rollout).init_group(body)


@routes.on("POST", "/destroy_weights_update_group", Access.CONTROL)
async def destroy_weights_update_group(
    rollout: Engine, body: DestroyGroupBody | None = None
) -> Document:
    return await SglangVerbs(rollout).destroy_group(body or DestroyGroupBody())


@routes.on("POST", "/begin_weight_update", Access.CONTROL)
async def begin_weight_update(rollout: Engine, body: NoBody | None = None) -> Document:
    return await SglangVerbs(rollout).begin()


@routes.on("POST", "/update_weights_from_distributed", Access.CONTROL)
async def update_weights_from_distributed(rollout: Engine, body: DistributedBody) -> Document:
    return await SglangVerbs(rollout).from_distributed(body)


@routes.on("POST", "/end_weight_update", Access.CONTROL)
async def end_weight_update(rollout: Engine, body: NoBody | None = None) -> Document:
    return await SglangVerbs(rollout).end()


@routes.on("GET", "/weights_checker", Access.CONTROL)
@routes.on("POST", "/weights_checker", Access.CONTROL)
async def weights_checker(rollout: Engine, body: CheckBody | None = None) -> Document:
    return await SglangVerbs(rollout).check(body or CheckBody())


_SAID = frozenset(
    path for path in routes.paths if "weight" in path and not path.startswith("/get_")
)  # what answers with "success" and "message"
