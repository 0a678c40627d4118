"""What the parameters of a control route are: clients send them in the query, or as a JSON body."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, get_origin

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from rollout.errors import InvalidRequest
from rollout.server.auth import Access, access_of
from rollout.wire.spellings import near

_GATEWAYS = frozenset(("api-version",))  # what is added on the way, and asks for nothing


class ControlParams:
    """A dependency that reads ``kind`` from a request: ``Depends(ControlParams(PauseParams))``.

    Each field may come in the query (a list: repeated) or in the body, a JSON object whatever its
    content type says, and in no more than one of them. ``InvalidRequest`` names a field that is
    unknown, or in both.
    """

    def __init__(self, kind: type[BaseModel]) -> None:
        self._kind = kind
        self.names = frozenset(kind.model_fields)

    async def __call__(self, request: Request) -> Any:
        values: dict[str, Any] = {}
        for name in request.query_params.keys() - _GATEWAYS:
            several = request.query_params.getlist(name)
            values[name] = several if self._is_list(name) else several[-1]
        for name, value in _document(await request.body(), self.names).items():
            if name in values:
                raise InvalidRequest(f"{name} is in the query and in the body: give it once")
            values[name] = value
        check_names(values, self.names, request.url.path)
        try:
            return self._kind.model_validate(values)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None

    def _is_list(self, name: str) -> bool:
        field = self._kind.model_fields.get(name)
        return field is not None and any(
            get_origin(kind) is list
            for kind in (field.annotation, *getattr(field.annotation, "__args__", ()))
        )


class StrictRoute(APIRoute):
    """A control route refuses names in the query that it does not take, and a body where it has
    none: what is passed over in silence would look as if it had been done.

    Others take whatever clients and gateways add to the query (an SDK's version, say).
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if all(access_of(method, self.path) is not Access.CONTROL for method in self.methods or ()):
            return handler
        known, takes_body = _names_of(self.dependant), bool(self.body_field)
        takes_body |= any(isinstance(d.call, ControlParams) for d in self.dependant.dependencies)

        async def checked(request: Request) -> Response:
            check_names(request.query_params.keys() - _GATEWAYS, known, request.url.path)
            if request.method == "POST" and not takes_body:
                given = _document(await request.body(), known)
                check_names(given, (), request.url.path)
            return await handler(request)

        return checked


def check_names(given: Collection[str], known: Collection[str], path: str) -> None:
    """``InvalidRequest`` for the first name that is not ``known`` at ``path``."""
    for name in given:
        if name in known:
            continue
        if (meant := near(name, known)) is not None:
            hint = f"did you mean {meant!r}?"
        else:
            hint = f"known: {', '.join(sorted(known))}" if known else "it takes none"
        raise InvalidRequest(f"unknown parameter {name[:80]!r} of {path}; {hint}")


def _names_of(dependant: Any) -> frozenset[str]:
    """What a route and what it depends on read from the query."""
    found = {param.alias for param in dependant.query_params}
    if isinstance(dependant.call, ControlParams):
        found |= dependant.call.names
    return frozenset(found.union(*map(_names_of, dependant.dependencies)))


def _document(body: bytes, known: Collection[str]) -> Mapping[str, Any]:
    if not body.strip():
        return {}
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if found is not None and not isinstance(found, dict):
        what = f" of {', '.join(sorted(known))}" if known else ""
        raise InvalidRequest(f"the body must be a JSON object{what}, not {found!r:.80}")
    return found or {}
