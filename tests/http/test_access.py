"""Who gets in: tokens route by route, what is open without one, and how much is read of anybody."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from server_settings import CONTROL, MAX_BODY, OPENED, TOKEN
from serving import Served
from starlette.responses import JSONResponse
from starlette.routing import Route

from rollout import Rollout
from rollout.api import AsyncRollout
from rollout.errors import ConfigError
from rollout.server.auth import ROUTES, Access, Tokens, check_encrypted
from rollout.server.http.app import build_app
from rollout.server.http.guard import Guard, Routes, include
from rollout.server.http.open_routes import HTTP_ROUTES, OpenRoutes

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def app() -> FastAPI:
    """All routes, over an engine that is never started."""
    return build_app(AsyncRollout("nowhere"), tokens=Tokens(generation=TOKEN, control=CONTROL))


def routes_of(app: FastAPI) -> dict[str, set[str]]:
    """Path -> methods; anything but a plain route fails, as the policy would not know it."""

    def walk(routes: Any) -> Iterator[Route]:
        for route in routes:
            included = getattr(route, "original_router", None)  # since fastapi 0.16x
            if included is not None:
                yield from walk(included.routes)
            else:
                assert isinstance(route, Route), route
                yield route

    found = {route.path: set(route.methods or ()) - {"HEAD"} for route in walk(app.routes)}
    assert found
    return found


def test_every_route_says_what_it_asks_of_its_caller(app: FastAPI) -> None:
    assert set(routes_of(app)) == HTTP_ROUTES
    # The policy goes by whole paths, but of these, which take any end.
    assert [path for path in routes_of(app) if "{" in path] == ["/v1/models/{model:path}"]


def test_what_every_route_answers_to_each_caller(served: Served, app: FastAPI) -> None:
    """Bodies are broken where one is due, so that nothing is done: who is let in gets 400 or so."""
    callers = {None: Access.OPEN, TOKEN: Access.GENERATION, CONTROL: Access.CONTROL}
    skipped = {"/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/flush_cache"}
    skipped |= {"/release_memory_occupation"}  # by GET they take no body
    with httpx.Client(base_url=f"http://{served.http}", timeout=30) as client:
        for path, methods in routes_of(app).items():
            for token, access in callers.items():
                headers = JSON | ({"Authorization": f"Bearer {token}"} if token else {})
                for method in methods:
                    allowed = access >= ROUTES[method, path]
                    if allowed and path in skipped:
                        continue
                    body = None if method == "GET" else b"{"
                    reply = client.request(method, path, headers=headers, content=body)
                    assert (reply.status_code == 401) is not allowed, (path, token, reply.text)


def test_a_route_that_does_not_say_who_may_call_it_is_refused_at_the_start() -> None:
    routes = Routes()
    routes.get("/new_route")(lambda: None)
    with pytest.raises(ConfigError, match=r"/new_route.* does not say who may call it"):
        include(FastAPI(), routes)


def test_a_route_added_later_is_closed_until_it_is_listed(app: FastAPI) -> None:
    tokens = Tokens(generation=TOKEN, control=CONTROL)
    assert tokens.refusal("/new_route", f"Bearer {TOKEN}")
    assert tokens.refusal("/health/", None, "GET") is None  # the router sends it on to /health
    assert tokens.refusal("/pause/", f"Bearer {TOKEN}")
    assert tokens.refusal("/health\n", None, "GET")
    assert tokens.refusal("/new_route", f"Bearer {CONTROL}") is None
    assert tokens.refusal("/health", None, "DELETE") is None  # the router says that there is none
    assert tokens.refusal("/pause", f"Bearer {TOKEN}", "GET")
    assert tokens.refusal("/v1/models/a/b", f"Bearer {TOKEN}", "GET") is None
    for path in ("/v1/models/a", "/v1/models/../health", "/v1/model"):
        assert tokens.refusal(path, None, "GET")


def test_missing_wrong_and_insufficient_tokens_are_told_apart(served: Served) -> None:
    with httpx.Client(base_url=f"http://{served.http}") as client:
        for given, words in (
            (None, "none was given"),
            ("Bearer x", "is wrong"),
            ("Basic eDp5", "another form"),
            (f"Bearer {TOKEN}", "the token given is the one for generation"),
        ):
            reply = client.post("/pause", headers={"Authorization": given} if given else {})
            assert reply.status_code == 401
            assert words in reply.json()["error"]["message"]


# ---- pages of other sites ----

OWN = {"host": "127.0.0.1:8000"}
FOREIGN = [
    OWN | {"sec-fetch-site": "cross-site"},
    OWN | {"sec-fetch-site": "same-site"},  # as a page at another port of this machine
    OWN | {"origin": "https://evil.example"},
    OWN | {"origin": "http://127.0.0.1:8001"},
    OWN | {"origin": "null"},
    {"host": "evil.example:8000", "origin": "http://evil.example:8000"},  # DNS rebinding
    {"host": "evil.example:8000", "sec-fetch-site": "same-origin"},
    {"host": "localhost.evil.example", "sec-fetch-site": "none"},
    {"host": "[::1", "origin": "http://[::1"},
]
WELCOME = [
    {"host": "engine.example:8000"},  # no browser
    OWN | {"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:8000"},
    {"host": "LOCALHOST:8000", "origin": "http://localhost:8000"},
    {"host": "[::1]:8000", "sec-fetch-site": "none"},
]


@pytest.mark.parametrize("headers", [*FOREIGN, *WELCOME], ids=str)
async def test_pages_of_other_sites_control_nothing_without_a_token(
    headers: dict[str, str],
) -> None:
    async def below(scope: Any, receive: Any, send: Any) -> None:
        await JSONResponse({})(scope, receive, send)

    async def status(guard: Guard, method: str, path: str) -> int:
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            reply = await client.request(method, path, headers=headers)
        if reply.status_code == 403:
            assert re.search(remedy, reply.json()["error"]["message"])
        return reply.status_code

    control, remedy = ("/pause", "/update_weights", "/fleet/members"), "with a --control-token"
    expected = 403 if headers in FOREIGN else 200
    guard = Guard(below, tokens=Tokens(), max_body_bytes=1000)
    assert {await status(guard, "POST", path) for path in control} == {expected}
    assert await status(guard, "GET", "/flush_cache") == expected
    for path in ("/", "/dashboard/state", "/health", "/v1/models"):
        assert await status(guard, "GET", path) == 200
    remedy = "to the address where tokens are asked for"
    opened = Guard(below, tokens=Tokens(), max_body_bytes=1000, open_routes=["/pause"])
    assert await status(opened, "POST", "/pause") == expected
    guarded = Guard(below, tokens=Tokens(control=CONTROL), max_body_bytes=1000)
    assert await status(guarded, "POST", "/pause") == 401


# ---- open routes ----


def test_open_routes_answer_at_their_own_address_and_no_others_do(
    served: Served, open_port: int, app: FastAPI
) -> None:
    body = {"prompt": [5, 6], "max_tokens": 2}
    with httpx.Client(base_url=f"http://127.0.0.1:{open_port}", timeout=30) as stranger:
        assert stranger.get("/health").json() == {"status": "running"}
        assert stranger.get("/v1/models").status_code == 200
        assert stranger.post("/v1/completions", json=body).status_code == 200
        for path in set(routes_of(app)) - set(OPENED.split(",")):
            for method in routes_of(app)[path]:
                for headers in ({}, {"Authorization": f"Bearer {CONTROL}"}):
                    reply = stranger.request(method, path, headers=headers)
                    assert reply.status_code == 404, path
    with httpx.Client(base_url=f"http://{served.http}") as stranger:
        assert stranger.post("/v1/completions", json=body).status_code == 401


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        (["/v1/completion"], r"did you mean /v1/completions\?"),
        (["*"], "one by one"),
        (["/v1/*"], "did you mean|one by one"),
        (["/rollout.v1.Generation/Generate"], "no HTTP route"),
        ([], "no open routes"),
        ([""], "one by one"),
        (sorted(HTTP_ROUTES), "all routes cannot be opened"),
    ],
)
def test_open_routes_are_named_one_by_one(routes: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OpenRoutes(routes=routes)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", ""])
def test_open_routes_are_bound_to_one_network(host: str) -> None:
    with pytest.raises(ConfigError, match="open routes cannot listen on"):
        OpenRoutes(routes=["/health"], host=host)


def test_a_host_beyond_loopback_needs_tls_or_a_word() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check_encrypted(host, tls=False, insecure=False)
    with pytest.raises(ConfigError, match="--insecure"):
        check_encrypted("10.0.0.1", tls=False, insecure=False)
    check_encrypted("10.0.0.1", tls=True, insecure=False)
    check_encrypted("10.0.0.1", tls=False, insecure=True)
    with pytest.raises(ConfigError, match=r"replace the weights: .*--token"):
        Tokens().check_host("10.0.0.1", tls=True)
    with pytest.raises(ConfigError, match=r"network generate: .*--token"):
        Tokens(control="c").check_host("10.0.0.1", tls=True)


# ---- how much is read ----


def peak_bytes(served: Served) -> int:
    """The most memory that the server has ever had."""
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def chunks(count: int) -> Iterator[bytes]:
    """``count`` MiB without an announced length: the beginning of a valid body."""
    yield b'{"prompt": "'
    for _ in range(count):
        yield b"x" * (1 << 20)


BODIES = ["/v1/completions", "/tokenize", "/update_weights", "/init_weight_transfer_engine"]


@pytest.mark.parametrize("path", BODIES)
def test_a_body_beyond_the_limit_is_refused_and_not_kept(
    served: Served, http: httpx.Client, path: str
) -> None:
    http.get("/health")
    before = peak_bytes(served)
    for content in (b"x" * (24 << 20), chunks(24)):
        reply = http.post(path, content=content, headers=JSON)
        assert reply.status_code == 413, reply.text
        error = reply.json()["error"]
        assert error["code"] == 413
        assert str(MAX_BODY) in error["message"]
    assert peak_bytes(served) - before < 8 * MAX_BODY  # of 48
    assert http.get("/health").status_code == 200


def test_an_announced_length_is_refused_before_a_byte_of_it_is_sent(served: Served) -> None:
    host, _, port = served.http.partition(":")
    lines = [
        "POST /tokenize HTTP/1.1", "Host: x", "Content-Type: application/json",
        f"Authorization: Bearer {TOKEN}", "Content-Length: 99999999999999", "", "",
    ]  # fmt: skip
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall("\r\n".join(lines).encode())
        assert sock.recv(64).startswith(b"HTTP/1.1 413 ")


HEAD = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "path": (b"GET /", b"x"),
    "field": (b"GET /health HTTP/1.1\r\nX: ", b"x"),
    "fields": (b"GET /health HTTP/1.1\r\n", b"X: " + b"x" * 59 + b"\r\n"),
    "chunk's extension": (HEAD + b"1;", b"x"),
    "field behind a body": (HEAD + b"1\r\nx\r\n0\r\nX: ", b"x"),
    "fields behind a body": (HEAD + b"1\r\nx\r\n0\r\n", b"X: " + b"x" * 59 + b"\r\n"),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_has_no_end_beside_a_body_is_refused_and_not_kept(served: Served, kind: str) -> None:
    host, _, port = served.http.partition(":")
    begin, more = ENDLESS[kind]
    before, answer = peak_bytes(served), b""
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(begin)
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                sock.sendall(more * ((1 << 20) // len(more)))
            pytest.fail("all of it was read")
        with contextlib.suppress(ConnectionError):  # what it had not read ends the connection
            while part := sock.recv(1 << 16):
                answer += part
    # Who has no token is told so as soon as that is known.
    assert answer[:13] in (b"", b"HTTP/1.1 400 ", b"HTTP/1.1 401 ")
    assert peak_bytes(served) - before < 8 << 20  # of 64


def test_a_long_head_and_a_longer_body_are_told_apart(http: httpx.Client) -> None:
    headers = JSON | {"X-Long": "x" * (48 << 10)}
    for _ in range(3):  # of one connection each counts for itself
        body = {"prompt": [5] * 20_000}
        assert "20000" in http.post("/v1/completions", json=body, headers=headers).text
        assert http.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize("token", [None, "wrong"])
def test_nothing_is_kept_of_a_stranger(served: Served, token: str | None) -> None:
    """Neither door reads what a caller without the right token sends."""
    headers = JSON | ({"Authorization": f"Bearer {token}"} if token else {})
    before = peak_bytes(served)
    with httpx.Client(base_url=f"http://{served.http}", timeout=30) as client:
        assert client.post("/tokenize", content=chunks(64), headers=headers).status_code == 401
    with pytest.raises(ConfigError, match="token"):
        Rollout.connect(served.grpc, token, timeout=20)
    import grpc

    from rollout.rpc.rollout_pb2 import GenerateRequest
    from rollout.rpc.services import GenerationStub

    options = [("grpc.max_send_message_length", -1)]
    request = GenerateRequest(prompts=[{"text": "x" * (60 << 20)}])
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(served.grpc, options=options) as channel:
        call = GenerationStub(channel).Generate(request, metadata=metadata, timeout=30)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert peak_bytes(served) - before < 16 << 20


async def test_the_guard_asks_for_nothing_past_the_limit() -> None:
    """Counted: of an endless body the application below is given the limit and no byte more."""
    given = 0

    async def endless() -> Any:
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    async def below(scope: Any, receive: Any, send: Any) -> None:
        nonlocal given
        while True:
            given += len((await receive())["body"])

    guard = Guard(below, tokens=Tokens(), max_body_bytes=1000)
    scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": []}
    with pytest.raises(Exception, match="1000 bytes"):
        await guard(scope, endless, None)  # type: ignore[arg-type]
    assert given == 1000

    async def never() -> Any:
        raise AssertionError("a refused request is not read")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    closed = Guard(below, tokens=Tokens(generation="t"), max_body_bytes=1000)
    await closed(scope, never, send)
    long = scope | {"headers": [(b"content-length", b"1001")]}
    await guard(long, never, send)
    assert [m["status"] for m in sent if "status" in m] == [401, 413]
    assert all(json.loads(m["body"])["error"] for m in sent if "body" in m)
