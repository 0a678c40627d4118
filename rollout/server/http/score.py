"""``/v1/score``: logprobs of given tokens, rows of token ids in and packed arrays out.

The shape is this project's own. vLLM's route of the same name compares texts by a cross-encoder
(``text_1``, ``text_2``), which is another thing and is refused by name.
"""

from __future__ import annotations

import base64
import uuid
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout.errors import InvalidRequest
from rollout.generation import SamplingParams, ScoreOutput
from rollout.server.auth import Access
from rollout.server.http.guard import Engine, Routes
from rollout.server.http.json_response import JSONResponse
from rollout.server.http.responses import sampled_by, unless_disconnected

MAX_ROWS = 2048  # of one call, as of embeddings
ARRAYS = ("logprobs", "top_ids", "top_logprobs", "rest_logprobs")
_CROSS_ENCODER = ("text_1", "text_2", "queries", "documents", "data_1", "data_2")

routes = Routes()
TokenIds = list[Annotated[int, Field(ge=0)]]


class ScoreBody(BaseModel):
    """As ``Rollout.score``. ``encoding_format`` "base64": arrays as {"dtype", "shape", "data"},
    little-endian; "float": as lists, with null for minus infinity. ``routed_experts``: each in that
    base64 form.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    prompts: list[str] | list[TokenIds]
    completions: list[TokenIds] | None = None
    top_logprobs: int = 0
    last_n: int | None = None
    temperature: float = 1.0
    encoding_format: Literal["float", "base64"] = "float"
    model: str | None = None
    adapter: str | None = None
    routed_experts: list[dict[str, Any] | None] | None = None
    request_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _ours(cls, values: Any) -> Any:
        for name in _CROSS_ENCODER:
            if isinstance(values, dict) and name in values:
                raise ValueError(
                    f"{name} is of vLLM's score by a cross-encoder, which is not served; here "
                    "token ids are scored: prompts, completions"
                )
        return values


@routes.on("POST", "/v1/score", Access.GENERATION)
async def score(rollout: Engine, body: ScoreBody, request: Request) -> Response:
    count = len(body.prompts)
    if not 1 <= count <= MAX_ROWS:
        raise InvalidRequest(f"prompts has {count} entries; 1 to {MAX_ROWS} go in one call")
    model, params = await sampled_by(rollout, body.model, SamplingParams(adapter=body.adapter))
    name = body.request_id or f"score-{uuid.uuid4().hex}"
    work = rollout.score(
        body.prompts,
        body.completions,
        top_logprobs=body.top_logprobs,
        last_n=body.last_n,
        temperature=body.temperature,
        adapter=params.adapter,
        routed_experts=body.routed_experts,
        request_ids=name,
    )
    done = await unless_disconnected(request, work)
    scored = sum(len(output.token_ids) for output in done)
    tokens = sum(output.start + len(output.token_ids) for output in done)
    return JSONResponse(
        {
            "object": "list",
            "id": name,
            "data": [_row(*each, body.encoding_format) for each in enumerate(done)],
            "model": model,
            "usage": {"prompt_tokens": tokens, "scored_tokens": scored, "total_tokens": tokens},
        }
    )


def _row(index: int, output: ScoreOutput, encoding: str) -> dict[str, Any]:
    as_form = _packed if encoding == "base64" else _listed
    return {
        "object": "score",
        "index": index,
        "start": output.start,
        "num_tokens": len(output.token_ids),
        **{name: as_form(getattr(output, name)) for name in ARRAYS},
        "weight_version": output.weight_version,
        "weight_versions": [
            {"version": s.version, "start": s.start, "stop": s.stop} for s in output.weight_versions
        ],
        "is_mixed": output.is_mixed,
        "epoch": output.epoch,
        "num_cached_tokens": output.num_cached_tokens,
    }


def _packed(array: NDArray[Any]) -> dict[str, Any]:
    data = array.astype(array.dtype.newbyteorder("<")).tobytes()
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "data": base64.b64encode(data).decode(),
    }


def _listed(array: NDArray[Any]) -> list[Any]:
    if not np.isfinite(array).all():
        array = array.astype(object)
        array[array == -np.inf] = None
    found: list[Any] = array.tolist()
    return found
