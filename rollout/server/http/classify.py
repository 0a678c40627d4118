"""What a score head is asked by: vLLM's ``/classify`` and ``/pooling``, and SGLang's ``/classify``.

The last two share a path: a body with ``text`` or ``input_ids`` is SGLang's, and is answered so.
"""

from __future__ import annotations

import base64
import time
import uuid
from typing import Any, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from rollout.api import AsyncRollout
from rollout.errors import InvalidRequest
from rollout.generation import ClassificationOutput, SamplingParams
from rollout.server.auth import Access
from rollout.server.http.finite import finite
from rollout.server.http.guard import Engine, Routes
from rollout.server.http.json_response import JSONResponse
from rollout.server.http.openai.chat_body import ConversationBody
from rollout.server.http.openai.messages import template_messages
from rollout.server.http.openai.types import OpenAIBody, Prompts, TokenId, prompts_of
from rollout.server.http.responses import sampled_by, unless_disconnected

MAX_INPUTS = 2048  # of one call, as of embeddings

routes = Routes()
Document = dict[str, Any]


class _HeadBody(ConversationBody, OpenAIBody):
    """One of ``input`` and ``messages``, which are one conversation, whole: without the beginning
    of a turn behind it, unless ``add_generation_prompt``. ``use_activation`` False: logits in the
    place of probabilities.
    """

    input: Prompts | None = None
    messages: list[Document] | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True
    use_activation: bool = True
    adapter: str | None = None
    dimensions: int | None = None

    async def asked(
        self, rollout: AsyncRollout, name: str, pooling: str
    ) -> tuple[str, list[ClassificationOutput]]:
        """The name of the model, and an output for each prompt."""
        params = SamplingParams(adapter=self.adapter)
        model, params = await sampled_by(rollout, self.model, params)
        if self.messages is not None:
            messages = template_messages(self.messages)
            options = self.options()
            found = await rollout.classify(
                messages,
                pooling=pooling,
                adapter=params.adapter,
                request_ids=[name],
                tools=options.tools,
                chat_template_kwargs=options.chat_template_kwargs,
                add_generation_prompt=bool(self.add_generation_prompt),
                continue_final_message=self.continue_final_message,
            )
            return model, found
        prompts: list[Any] = list(prompts_of(self.prompts(), "input"))
        if (count := len(prompts)) > MAX_INPUTS:
            raise InvalidRequest(f"input has {count} entries; at most {MAX_INPUTS} in one call")
        if not self.add_special_tokens:
            prompts = [
                await rollout.tokenize(p, add_special_tokens=False) if isinstance(p, str) else p
                for p in prompts
            ]
        found = await rollout.classify(
            prompts, pooling=pooling, adapter=params.adapter, request_ids=name
        )
        return model, found

    def prompts(self) -> Prompts:
        if self.input is None:
            raise InvalidRequest("exactly one of 'input' and 'messages' must be given")
        return self.input

    @field_validator("dimensions")
    @classmethod
    def _has_no_dimensions(cls, value: int | None) -> int | None:
        if value is not None:
            raise ValueError(
                "a score head has one value for each class, and all of them are given; "
                "/v1/embeddings takes dimensions"
            )
        return value

    @model_validator(mode="after")
    def _one_of(self) -> _HeadBody:
        if self.input is not None and self.messages is not None:
            raise ValueError("exactly one of 'input' and 'messages' must be given")
        return self


class ClassifyBody(_HeadBody):
    """``activation`` and ``softmax`` are older names of ``use_activation``; ``text``, ``input_ids``
    and ``rid`` SGLang's of ``input`` and ``request_id``.
    """

    activation: bool | None = None
    softmax: bool | None = None
    text: str | list[str] | None = None
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    rid: str | None = None

    @model_validator(mode="after")
    def _one_of_all(self) -> ClassifyBody:
        if self.messages is not None and self.is_sglangs:
            raise ValueError("exactly one of 'messages' and SGLang's 'text' and 'input_ids'")
        return self

    @property
    def is_sglangs(self) -> bool:
        return self.text is not None or self.input_ids is not None

    def prompts(self) -> Prompts:
        given = [one for one in (self.input, self.text, self.input_ids) if one is not None]
        if len(given) != 1 or self.messages is not None:
            raise InvalidRequest(
                "exactly one of 'input' and 'messages', or SGLang's 'text' and 'input_ids', must "
                "be given"
            )
        return given[0]

    @property
    def activates(self) -> bool:
        return all(
            said is not False for said in (self.use_activation, self.activation, self.softmax)
        )


class PoolingBody(_HeadBody):
    """``task``: of the last token, or "token_classify": of each."""

    task: Literal["classify", "token_classify"] = "classify"
    encoding_format: Literal["float", "base64"] = "float"


@routes.on("POST", "/classify", Access.GENERATION)
@routes.on("POST", "/v1/classify", Access.GENERATION)
async def classify(rollout: Engine, body: ClassifyBody, request: Request) -> Response:
    began = time.monotonic()
    name = body.rid or body.request_id or f"classify-{uuid.uuid4().hex}"
    done = await unless_disconnected(request, body.asked(rollout, name, "last"))
    model, outputs = done
    if body.is_sglangs:
        given, took = body.prompts(), time.monotonic() - began
        rows = [_sglang_row(output, took) for output in outputs]
        one = isinstance(given, str) or isinstance(given[0], int)
        return JSONResponse(rows[0] if one else rows)
    rows = [_row(*each, body.activates) for each in enumerate(outputs)]
    return JSONResponse(_listed(name, model, rows, outputs))


@routes.on("POST", "/pooling", Access.GENERATION)
async def pooling(rollout: Engine, body: PoolingBody, request: Request) -> Response:
    name = body.request_id or f"pool-{uuid.uuid4().hex}"
    which = "all" if body.task == "token_classify" else "last"
    done = await unless_disconnected(request, body.asked(rollout, name, which))
    model, outputs = done
    rows = [_pooled(*each, body) for each in enumerate(outputs)]
    return JSONResponse(_listed(name, model, rows, outputs))


def _listed(
    name: str, model: str, rows: list[Document], outputs: list[ClassificationOutput]
) -> Document:
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return {
        "id": name,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": rows,
        "usage": {**usage, "prompt_tokens_details": None},
    }


def _row(index: int, output: ClassificationOutput, activates: bool) -> Document:
    return {
        "index": index,
        "label": output.label,
        "probs": _numbers(output.probs if activates else output.logits),
        "num_classes": len(output.labels.names),
        "logits": _numbers(output.logits),
        **_stamp(output),
    }


def _pooled(index: int, output: ClassificationOutput, body: PoolingBody) -> Document:
    values = output.probs if body.use_activation else output.logits
    if body.encoding_format == "base64":
        data: Any = base64.b64encode(values.astype("<f4").tobytes()).decode()
    else:
        data = [_numbers(row) for row in values] if values.ndim > 1 else _numbers(values)
    return {"index": index, "object": "pooling", "data": data, **_stamp(output)}


def _sglang_row(output: ClassificationOutput, took: float) -> Document:
    """Logits, which SGLang's clients find under this name."""
    return {
        "embedding": _numbers(output.logits),
        "meta_info": {
            "id": output.request_id,
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "weight_version": str(output.weight_version),
            "epoch": output.epoch,
            "e2e_latency": took,
        },
    }


def _stamp(output: ClassificationOutput) -> Document:
    return {
        "weight_version": output.weight_version,
        "is_mixed": output.is_mixed,
        "epoch": output.epoch,
        "num_cached_tokens": output.num_cached_tokens,
    }


def _numbers(values: NDArray[np.float32]) -> list[float | None]:
    return [finite(value) for value in values.tolist()]
