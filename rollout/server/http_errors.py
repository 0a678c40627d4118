"""Errors and tokens of the HTTP server, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.base import RequestResponseEndpoint

from rollout.errors import STATUS, RolloutError
from rollout.server.auth import Tokens

RETRY_AFTER = "1"  # seconds, of an overloaded engine
OPEN_PATHS = ("/health", "/ping")
GENERATION_PATHS = (
    "/v1/",
    "/tokenize",
    "/metrics",
    "/version",
    "/weight_info",
    "/is_",
    "/server_info",
    "/get_world_size",
)


def error_body(error: RolloutError) -> tuple[dict[str, Any], int]:
    """The JSON body and HTTP status of an error; a class without a row takes its base's."""
    status = _status(type(error))
    return _body(str(error), type(error).__name__, status), status


def install_error_handlers(app: FastAPI) -> None:
    """Named errors, malformed bodies and unknown paths; nothing of a user's doing is a 500."""

    @app.exception_handler(RolloutError)
    async def named(request: Request, error: RolloutError) -> Response:
        body, status = error_body(error)
        return JSONResponse(body, status, {"Retry-After": RETRY_AFTER} if status == 429 else None)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return JSONResponse(_body(_explain(error), "InvalidRequest", 400), 400)

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code in (404, 405) and message in ("Not Found", "Method Not Allowed"):
            message = f"{message}: {request.method} {request.url.path}"
        kind = "NotFoundError" if error.status_code == 404 else "HTTPError"
        body = _body(message, kind, error.status_code)
        return JSONResponse(body, error.status_code)


def require_tokens(app: FastAPI, tokens: Tokens) -> None:
    """Ask for a bearer token: ``generation`` for sampling and looking, ``control`` for the rest."""
    if tokens.generation is None and tokens.control is None:
        return

    @app.middleware("http")
    async def check(request: Request, call_next: RequestResponseEndpoint) -> Response:
        path, given = request.url.path, request.headers.get("authorization")
        sampling = path.startswith(GENERATION_PATHS)
        allowed = tokens.allows_generation if sampling else tokens.allows_control
        if path not in OPEN_PATHS and not allowed(given):
            body = _body("missing or wrong bearer token", "AuthenticationError", 401)
            return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
        return await call_next(request)


def _status(cls: type[BaseException]) -> int:
    rows = (STATUS[base][1] for base in cls.__mro__ if base in STATUS)
    return next(rows)


def _body(message: str, kind: str, status: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _explain(error: RequestValidationError) -> str:
    """The first complaints, each with the field it is about."""
    lines = []
    for row in error.errors()[:4]:
        if row["type"] == "json_invalid":
            return f"the body is not JSON: {row['ctx']['error']} at byte {row['loc'][-1]}"
        where = ".".join(str(part) for part in row["loc"] if part != "body")
        message = str(row["msg"]).removeprefix("Value error, ")
        lines.append(f"{where}: {message}" if where else message)
    return "; ".join(lines)
