"""Errors of the HTTP server, in the shape of the dialect whose route was called."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from rollout.errors import STATUS, EngineClosed, RolloutError, WorkerDied
from rollout.server.auth import ROUTES
from rollout.server.http.absent_routes import instead_of
from rollout.server.http.json_response import JSONResponse
from rollout.wire.spellings import near

RETRY_AFTER = "1"  # seconds, of an overloaded engine
_ALIKE = 0.8  # a path that is meant: they have much in common that says nothing
ErrorShape = Callable[[str, str, str, int], tuple[dict[str, Any], int]]
_KINDS = {400: "InvalidRequest", 404: "NotFoundError", 413: "InvalidRequest"}


def verb_status(error: RolloutError) -> int:
    """The HTTP status of a weight verb's error: below 500 while there is an engine.

    Clients send a request again upon a status from 500 on, and an update that has failed stays so.
    """
    status = _status(type(error))
    return status if status < 500 or isinstance(error, EngineClosed | WorkerDied) else 409


def error_body(error: RolloutError) -> tuple[dict[str, Any], int]:
    """The JSON body and HTTP status of an error; a class without a row takes its base's."""
    status = _status(type(error))
    return openai_error(str(error), type(error).__name__, status), status


def openai_shape(path: str, message: str, kind: str, status: int) -> tuple[dict[str, Any], int]:
    return openai_error(message, kind, status), status


def shaped(
    shapes: Mapping[str, ErrorShape], path: str, message: str, kind: str, status: int
) -> tuple[dict[str, Any], int]:
    """The JSON body and the status of an error at ``path``."""
    path = path.rstrip("/")
    return shapes.get(path, openai_shape)(path, message, kind, status)


def install_error_handlers(app: FastAPI, shapes: Mapping[str, ErrorShape]) -> None:
    """Named errors, malformed bodies and unknown paths, as JSON; ``shapes`` by path.

    Nothing that a caller sends is a 500 (``benchmarks/fuzz.py`` looks for what is): that is an
    ``EngineError`` of the engine's own, or a defect, which is logged with its traceback.
    """

    def reply(
        request: Request,
        message: str,
        kind: str,
        status: int,
        headers: Mapping[str, str] | None = None,
    ) -> JSONResponse:
        body, status = shaped(shapes, request.url.path, message, kind, status)
        more = {"Retry-After": RETRY_AFTER} if status == 429 else {}
        return JSONResponse(body, status, {**(headers or {}), **more})

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        text = f"{type(error).__name__} in {request.url.path}; the server's log has the traceback"
        return reply(request, text, "InternalServerError", 500)

    @app.exception_handler(RolloutError)
    async def named(request: Request, error: RolloutError) -> Response:
        verb = getattr(request.state, "is_weight_verb", False)
        status = verb_status(error) if verb else _status(type(error))
        return reply(request, str(error), type(error).__name__, status)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return reply(request, _explain(error, _fields(request)), "InvalidRequest", 400)

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code in (404, 405) and message in ("Not Found", "Method Not Allowed"):
            message = f"{message}: {request.method} {request.url.path}"
            if remedy := _route_meant(request.url.path, error):
                message = f"{message}; {remedy}"
        elif error.status_code == 400 and error.__cause__ is not None:  # of a body's parser
            is_deep = isinstance(error.__cause__, RecursionError)
            message = "it is nested too deeply" if is_deep else str(error.__cause__)
            message = f"the body cannot be read as JSON: {message}"
        kind = _KINDS.get(error.status_code, "HTTPError")
        return reply(request, message, kind, error.status_code, error.headers)


def _route_meant(path: str, error: HTTPException) -> str:
    """What to call instead of a path, or method, that is not served; "" where nothing is near."""
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return f"use {allowed}" if allowed else ""
    if instead := instead_of(path):
        return instead
    served = {route: method for method, route in ROUTES}
    meant = near(path, served, _ALIKE)
    return "" if meant is None else f"did you mean {served[meant]} {meant}?"


def openai_error(message: str, kind: str, status: int) -> dict[str, Any]:
    """The JSON body of an error as OpenAI's API has it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _status(cls: type[BaseException]) -> int:
    rows = (STATUS[base][1] for base in cls.__mro__ if base in STATUS)
    return next(rows)


# What a prompt may be: pydantic's name of each alternative, and ours.
_KINDS_OF_PROMPT = {
    "str": "a text",
    "list[str]": "a list of texts",
    "list[constrained-int]": "a list of token ids",
    "list[list[constrained-int]]": "a list of lists of token ids",
}


def _fields(request: Request) -> Collection[str]:
    """Of the body that the route takes."""
    body = getattr(request.scope.get("route"), "body_field", None)
    model = None if body is None else body.field_info.annotation
    return getattr(model, "model_fields", {}).keys()


def _explain(error: RequestValidationError, known: Collection[str] = ()) -> str:
    """The first complaints, each with the field it is about, and the one of ``known`` meant."""
    lines: dict[str, None] = {}  # each once
    rows = error.errors()
    kinds_of = _kinds(rows)
    for row in rows:  # one for each id of a prompt, so that each is looked at once
        if len(lines) == 4:
            break
        if row["type"] == "json_invalid":
            return f"the body is not JSON: {row['ctx']['error']} at byte {row['loc'][-1]}"
        if row["loc"] == ("body",) and isinstance(row["input"], bytes):
            return "the body was not read: say that it is JSON, Content-Type: application/json"
        if row["loc"] == ("body",) and row["type"] == "missing":
            return "the body is missing: send a JSON object"
        if row["loc"] == ("body",) and row["type"] == "model_attributes_type":
            return f"the body must be a JSON object, not {row['input']!r:.80}"
        where = [part for part in row["loc"] if part != "body"]
        kinds = kinds_of[where[0]] if len(where) > 1 and where[1] in _KINDS_OF_PROMPT else []
        if len(kinds) > 1:
            message = (
                f"give {', '.join(kinds[:-1])} or {kinds[-1]}: all of one kind, and token ids "
                "greater than or equal to 0"
            )
            where = where[:1]
        else:
            message = str(row["msg"]).removeprefix("Value error, ")
        if row["type"] == "extra_forbidden" and len(where) == 1:
            meant = near(str(where[0]), known)
            message = f"no such field; did you mean {meant!r}?" if meant else message
        lines[": ".join(part for part in (".".join(map(str, where)), message) if part)] = None
    return "; ".join(lines)


def _kinds(rows: Sequence[Any]) -> dict[object, list[str]]:
    """By field, the alternatives that its value is none of."""
    found: dict[object, set[object]] = defaultdict(set)
    for row in rows:
        if len(row["loc"]) > 2:
            found[row["loc"][1]].add(row["loc"][2])
    return {
        field: [kind for tag, kind in _KINDS_OF_PROMPT.items() if tag in tags]
        for field, tags in found.items()
    }
