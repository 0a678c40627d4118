"""vLLM's routes for tokens in and out, and those that RL frameworks add to it or call by RPC.

SkyRL and prime-rl sample through ``/inference/v1/generate``; TRL renders chats first.
"""

from __future__ import annotations

import base64
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout.api import AsyncRollout
from rollout.api.backend import Outputs
from rollout.api.generation_verbs import in_order
from rollout.api.image_files import image_file
from rollout.api.prompts import PreparedChat
from rollout.config import DEFAULT_TIMEOUT
from rollout.errors import InvalidRequest, RolloutError
from rollout.generation import (
    AnyPrompt,
    Completion,
    RequestOutput,
    SamplingParams,
    VisualPrompt,
    Visuals,
)
from rollout.server.auth import Access
from rollout.server.http.errors import error_body
from rollout.server.http.guard import Engine, Routes
from rollout.server.http.json_response import JSONResponse
from rollout.server.http.openai.answer_defaults import AnswerDefaults
from rollout.server.http.openai.answers import (
    AnswerStyle,
    chat_logprobs,
    prompt_rows,
    token_id_text,
    with_top,
)
from rollout.server.http.openai.answers import usage as usage_of
from rollout.server.http.openai.chat_body import ChatBody
from rollout.server.http.openai.side_channels import (
    beside_tokens,
    skyrl_experts,
    skyrl_support,
)
from rollout.server.http.openai.types import (
    MAX_FIELDS,
    UNSUPPORTED_VALUES,
    RequestId,
    StreamOptions,
    one_for_true,
)
from rollout.server.http.responses import (
    EventStream,
    event,
    first_of,
    in_session,
    sampled_by,
    served_model,
    tokenizer_of,
    unless_disconnected,
)
from rollout.wire.spellings import asks_by_zero

routes = Routes()
Document = dict[str, Any]
MAX_SUPPORT = 1 << 26  # ids that ``return_sample_support`` packs: four bytes each, and their text
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
# Of vLLM's sampling parameters: how its engine hands outputs over, which changes no token.
_WITHOUT_EFFECT = frozenset(("output_kind", "skip_clone", "spaces_between_special_tokens"))


class ImageFeatures(BaseModel):
    """What ``render`` makes of a chat's images, and ``generate`` takes beside their placeholders.

    ``kwargs_data``: the files, in base64; nobody but this server reads them. The engine places
    them by the tokens alone, of which each image must have as many as ``length`` said.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    kwargs_data: dict[Literal["image"], list[str]]
    mm_placeholders: dict[Literal["image"], list[dict[str, int]]]
    mm_hashes: dict[Literal["image"], list[str]] = {}

    @classmethod
    def of(cls, chat: PreparedChat) -> ImageFeatures | None:
        if chat.shows.videos:
            raise InvalidRequest(
                "videos are not handed out: POST /v1/chat/completions takes them itself"
            )
        if not chat.placed:
            return None
        return cls(
            kwargs_data={"image": [base64.b64encode(file).decode() for file in chat.shows.images]},
            mm_placeholders={
                "image": [{"offset": p.start, "length": p.visual.count} for p in chat.placed]
            },
            mm_hashes={"image": [placed.visual.digest.hex() for placed in chat.placed]},
        )


class GenerateBody(BaseModel):
    """``/inference/v1/generate``, and SkyRL's ``/skyrl/v1/generate``; ``cache_salt`` is taken
    without effect: no KV is found by who does not send the very tokens, under the same weights.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    token_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    sampling_params: dict[str, Any] = Field(default_factory=dict, max_length=MAX_FIELDS)
    model: str | None = None
    request_id: RequestId | None = None
    return_token_ids: bool = False
    cache_salt: str | None = None
    priority: int = 0
    features: ImageFeatures | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_sample_support: bool = False  # SkyRL's name

    @model_validator(mode="before")
    @classmethod
    def _served(cls, values: Any) -> Any:
        """What is null, false or empty asks for nothing."""
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if v or k in ("token_ids", "sampling_params")}

    def prompt(self) -> AnyPrompt:
        """With the images that ``render`` has handed out."""
        if self.features is None:
            return self.token_ids
        files = self.features.kwargs_data.get("image", [])
        if len(files) != len(self.features.mm_placeholders.get("image", [])):
            raise InvalidRequest("features: mm_placeholders and kwargs_data differ in number")
        images = (image_file(f"data:;base64,{f}", f"image {n}") for n, f in enumerate(files))
        return VisualPrompt(self.token_ids, Visuals(images=tuple(images)))

    def params(self) -> SamplingParams:
        """vLLM's names are ours; without ``max_tokens`` up to the model's length."""
        asked: Document = {"max_tokens": None}
        if self.return_sample_support:
            asked["return_sampling_mask"] = True
        for name, given in self.sampling_params.items():
            value = one_for_true(given) if name in ("logprobs", "prompt_logprobs") else given
            if name in _DEFAULTS:
                asked |= {} if value is None and name != "max_tokens" else {name: value}
            elif name not in _WITHOUT_EFFECT and (value or asks_by_zero(name, value, _DEFAULTS)):
                asked[name] = value  # refused by name
        params = SamplingParams.from_dict(asked)
        if params.hidden_state:
            instead = UNSUPPORTED_VALUES["hidden_state"]
            raise InvalidRequest(f"hidden_state is not supported; {instead}")
        if self.stream and params.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs are not available when stream=True")
        return params


@routes.on("POST", "/inference/v1/generate", Access.GENERATION)
async def generate(rollout: Engine, body: GenerateBody, request: Request) -> Response:
    style, outputs = await _begun(rollout, body, request)
    if not body.stream:
        done = await unless_disconnected(request, in_order(outputs))
        return JSONResponse(_answer(done[0], style, body))
    first = await unless_disconnected(request, first_of(outputs))
    return EventStream(_events(first, outputs, style, body))


@routes.on("POST", "/skyrl/v1/generate", Access.GENERATION)
async def skyrl_generate(rollout: Engine, body: GenerateBody, request: Request) -> Response:
    """As SkyRL's own servers answer it: experts and kept sets as packed arrays."""
    if body.stream:
        raise InvalidRequest("/skyrl/v1/generate does not stream: /inference/v1/generate does")
    defaults: AnswerDefaults = request.app.state.defaults
    params = defaults.asked(body.params())
    if body.return_sample_support and (params.top_k <= 0 or params.greedy):
        raise InvalidRequest("return_sample_support needs top_k and a temperature: it is as wide")
    if body.return_sample_support:
        _check_support(params, rollout.backend.max_model_len)
    style, outputs = await _begun(rollout, body, request)
    done = await unless_disconnected(request, in_order(outputs))
    whole = _answer(done[0], style, body)
    for choice, completion in zip(whole["choices"], done[0].outputs, strict=True):
        choice["routed_experts"] = skyrl_experts(done[0], completion)
        wanted = body.return_sample_support
        choice["rollout_sample_support"] = skyrl_support(completion, params) if wanted else None
        choice.pop("sampling_mask", None)
    return JSONResponse(whole)


def _check_support(params: SamplingParams, max_model_len: int) -> None:
    """``InvalidRequest`` where the packed rows of an answer could take too much memory."""
    tokens = params.n * (max_model_len if params.max_tokens is None else params.max_tokens)
    if tokens * params.top_k > MAX_SUPPORT:
        raise InvalidRequest(
            f"return_sample_support packs top_k ids for each token: {params.top_k} for up to "
            f"{tokens} tokens are more than {MAX_SUPPORT}; ask for a smaller top_k, or fewer tokens"
        )


async def _begun(
    rollout: AsyncRollout, body: GenerateBody, request: Request
) -> tuple[AnswerStyle, Outputs]:
    defaults: AnswerDefaults = request.app.state.defaults
    params = in_session(defaults.asked(body.params()), request.headers)
    model, params = await sampled_by(rollout, body.model, params)
    style = AnswerStyle(
        model=model,
        chat=True,
        samples=params.n,
        logprobs=params.logprobs is not None,
        top=params.logprobs or 0,
        # SkyRL's servers tell those over the kept set with it: its trainer normalises over that.
        processed=defaults.logprobs_mode == "processed_logprobs" or body.return_sample_support,
        token_ids=True,
        token_text=token_id_text,  # as vLLM has it here: clients compare
        request_id=body.request_id or uuid.uuid4().hex,
    )
    if style.processed:
        params = with_top(params, "processed")
    outputs = rollout.stream_many(
        [body.prompt()], params, request_ids=[style.request_id], stream=body.stream
    )
    return style, outputs


async def _events(
    first: tuple[int, RequestOutput], outputs: Outputs, style: AnswerStyle, body: GenerateBody
) -> AsyncGenerator[str]:
    """Server-sent events, each with the tokens that are new; the usage where it is asked for."""
    sent: dict[int, tuple[int, str | None]] = {}  # choice -> tokens, and why it has ended
    options, output = body.stream_options or StreamOptions(), first[1]
    async with contextlib.aclosing(outputs):
        try:
            item: tuple[int, RequestOutput] | None = first
            while item is not None:
                output = item[1]
                for completion in output.outputs:
                    start, last = sent.get(completion.index, (0, None))
                    now = (len(completion.token_ids), completion.finish_reason)
                    if now == (start, last):
                        continue
                    sent[completion.index] = now
                    always = options.include_usage and options.continuous_usage_stats
                    used = {"usage": usage_of([output])} if always else {}
                    choice = _choice(output, completion, start, style)
                    yield event({"request_id": style.request_id, "choices": [choice], **used})
                item = await anext(outputs, None)
        except RolloutError as error:
            yield event(error_body(error)[0])
        else:
            if options.include_usage:
                used = {"usage": usage_of([output])}
                yield event({"request_id": style.request_id, "choices": [], **used})
        yield "data: [DONE]\n\n"


def _choice(
    output: RequestOutput, completion: Completion, start: int, style: AnswerStyle
) -> Document:
    """From token ``start`` on."""
    return {
        "index": completion.index,
        "token_ids": completion.token_ids[start:],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": chat_logprobs(completion, start, style) if style.logprobs else None,
        "epoch": output.epoch,
        "weight_versions": [asdict(span) for span in completion.weight_versions],
        "staleness": completion.staleness,
        **beside_tokens(output, completion, start),
        **({"adapter": completion.adapter} if completion.adapter else {}),
    }


def _answer(output: RequestOutput, style: AnswerStyle, body: GenerateBody) -> Document:
    choices = [_choice(output, completion, 0, style) for completion in output.outputs]
    return {
        "request_id": style.request_id,
        "model": style.model,
        "created": int(time.time()),
        "choices": choices,
        "usage": usage_of([output]),
        "prompt_logprobs": prompt_rows(output),
        "prompt_token_ids": output.prompt_token_ids if body.return_token_ids else None,
    }


@routes.on("POST", "/v1/chat/completions/render", Access.GENERATION)
async def render(rollout: Engine, body: ChatBody) -> Document:
    """The body of ``/inference/v1/generate`` that this chat would be."""
    model = await served_model(rollout, body.model)
    served = rollout.backend.served
    if served is None or served.prompts is None:
        raise InvalidRequest("this server's engine is elsewhere: chats are rendered there")
    await rollout.start()
    [chat] = await served.prompts.chats([body.conversation()], body.chat_options())
    features = ImageFeatures.of(chat)
    plain, asked = SamplingParams(max_tokens=None), body.sampling()
    changed = {
        field.name: value
        for field in fields(SamplingParams)
        if (value := getattr(asked, field.name)) != getattr(plain, field.name)
    }
    return {
        "request_id": body.request_id or f"chatcmpl-{uuid.uuid4().hex}",
        "token_ids": chat.token_ids,
        "sampling_params": changed,
        "model": model,
        "features": None if features is None else features.model_dump(),
    }


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]
    model: str | None = None


@routes.on("POST", "/detokenize", Access.GENERATION)
async def detokenize(rollout: Engine, body: DetokenizeBody) -> Document:
    await served_model(rollout, body.model)
    tokenizer = tokenizer_of(rollout)
    if tokenizer is None:
        raise InvalidRequest("this server has no tokenizer: token ids have no text here")
    return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}


@routes.on("POST", "/finish_session", Access.GENERATION)
async def finish_session(
    rollout: Engine, session_id: Annotated[str, Query(min_length=1)]
) -> Document:
    """SkyRL's routers let go of a session by it; here what ``X-Session-ID`` has gathered goes."""
    return {"session_id": session_id, "ended": rollout.sessions.end(session_id)}


class RpcBody(BaseModel):
    """``timeout``: seconds, of a method of ``worker_extension_cls``; verbs have their own, take
    names and no ``args``.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


async def _sleep(rollout: AsyncRollout, kwargs: Mapping[str, Any]) -> None:
    await rollout.sleep(kwargs.get("level", 1), kwargs.get("mode", "keep"))


async def _sleep_for_sync(rollout: AsyncRollout, kwargs: Mapping[str, Any]) -> None:
    await rollout.sleep(1)  # what runs is frozen, its KV computed again: SkyRL may keep a copy


async def _wake_up(rollout: AsyncRollout, kwargs: Mapping[str, Any]) -> None:
    await rollout.wake_up(kwargs.get("tags"))


async def _reset(rollout: AsyncRollout, kwargs: Mapping[str, Any]) -> None:
    await rollout.reset_prefix_cache()


# By RPC vLLM calls whatever its workers have; here these, each one verb.
RPC: Mapping[str, tuple[frozenset[str], Callable[..., Awaitable[None]]]] = {
    "sleep": (frozenset(("level", "mode")), _sleep),
    "wake_up": (frozenset(("tags",)), _wake_up),
    "reset_prefix_cache": (frozenset(), _reset),
    "skyrl_sleep_for_weight_sync": (frozenset(("offload_kv",)), _sleep_for_sync),
    "skyrl_wake_for_weight_sync": (frozenset(("tags",)), _wake_up),
}

# What SkyRL calls before weights go another way than is served, and its setting for one that is.
_INSTEAD = {
    "skyrl_set_lora_receive_target": " (set trainer.policy.model.lora.sync_mode=disk)",
}


@routes.on("POST", "/collective_rpc", Access.CONTROL)
async def collective_rpc(rollout: Engine, body: RpcBody) -> Document:
    if body.method not in RPC:
        return {"results": await _of_the_extension(rollout, body)}
    names, act = RPC[body.method]
    if body.args or set(body.kwargs) - names:
        raise InvalidRequest(
            f"{body.method} takes by name: {', '.join(sorted(names)) or 'nothing'}"
        )
    await act(rollout, body.kwargs)
    world = (await rollout.weight_info()).num_ranks
    return {"results": [None] * world}


async def _of_the_extension(rollout: AsyncRollout, body: RpcBody) -> list[Any]:
    served = rollout.backend.served
    config = None if served is None else served.config
    if config is None or config.worker_extension_cls is None:
        instead = _INSTEAD.get(body.method, "")
        raise InvalidRequest(
            f"method {body.method!r} is not served{instead}; {', '.join(RPC)} are, and methods of "
            "an engine's own --worker-extension-cls"
        )
    limit = DEFAULT_TIMEOUT if body.timeout is None else body.timeout
    return await rollout.collective_rpc(
        body.method, args=body.args, kwargs=body.kwargs, timeout=limit
    )
