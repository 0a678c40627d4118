"""OpenAI's ``/v1/embeddings``: the last hidden state of each input's last token."""

from __future__ import annotations

import base64
import uuid
from typing import Any, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import Response

from rollout.errors import InvalidRequest
from rollout.generation import EmbeddingOutput, SamplingParams
from rollout.server.auth import Access
from rollout.server.http.guard import Engine, Routes
from rollout.server.http.json_response import JSONResponse
from rollout.server.http.openai.types import OpenAIBody, Prompts, prompts_of
from rollout.server.http.responses import sampled_by, unless_disconnected

MAX_INPUTS = 2048  # of one call, as OpenAI has it

routes = Routes()


class EmbeddingBody(OpenAIBody):
    """``normalize`` False (vLLM's field): as the model has it, not of length 1. ``pooling``: of
    which tokens. ``dimensions``: the first so many numbers, which is an embedding where the model
    was trained for that.
    """

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool = True
    pooling: Literal["last", "mean"] = "last"
    adapter: str | None = None


@routes.on("POST", "/v1/embeddings", Access.GENERATION)
async def embeddings(rollout: Engine, body: EmbeddingBody, request: Request) -> Response:
    prompts = prompts_of(body.input, "input")
    if len(prompts) > MAX_INPUTS:
        raise InvalidRequest(f"input has {len(prompts)} entries; at most {MAX_INPUTS} in one call")
    model, params = await sampled_by(rollout, body.model, SamplingParams(adapter=body.adapter))
    name = body.request_id or f"embd-{uuid.uuid4().hex}"
    work = rollout.embed(
        prompts,
        normalize=body.normalize,
        pooling=body.pooling,
        dimensions=body.dimensions,
        adapter=params.adapter,
        request_ids=name,
    )
    done = await unless_disconnected(request, work)
    tokens = sum(len(output.prompt_token_ids) for output in done)
    return JSONResponse(
        {
            "object": "list",
            "data": [_row(*each, body.encoding_format) for each in enumerate(done)],
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def _row(index: int, output: EmbeddingOutput, encoding: str) -> dict[str, Any]:
    embedding: Any = output.embedding
    if encoding == "base64":  # of little-endian float32
        embedding = base64.b64encode(np.asarray(embedding, "<f4").tobytes()).decode()
    return {
        "object": "embedding",
        "index": index,
        "embedding": embedding,
        "weight_version": output.weight_version,
        "epoch": output.epoch,
    }
