"""HTTP over TLS, with the files that the gRPC door has too."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from certificates import make_certificates
from serving import Served, serve
from tiny_models import write_tiny

from rollout import AsyncRollout, Rollout
from rollout.errors import ConfigError, EngineClosed
from rollout.rpc.tls import ClientTls, ServerTls
from rollout.server.service import Listening, serving


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    return make_certificates(tmp_path_factory.mktemp("https"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the service follows."""
    return tmp_path_factory.mktemp("https")


@pytest.fixture(scope="module")
def secured(runs: Path, made: Callable[[str], str]) -> Iterator[Served]:
    model: Path = runs / "tiny"
    write_tiny(model)
    files = ("--tls-cert", made("ours.pem"), "--tls-key", made("ours.key"))
    following = ("--weight-dir", str(runs), "--follow", str(runs))
    with serve(model, *files, "--tls-client-ca", made("ours-ca.pem"), *following) as running:
        yield running


def https(
    served: Served, made: Callable[[str], str], who: str | None, ca: str = "ours"
) -> httpx.Client:
    context = ssl.create_default_context(cafile=made(f"{ca}-ca.pem"))
    if who is not None:
        context.load_cert_chain(made(f"{who}.pem"), made(f"{who}.key"))
    return httpx.Client(base_url=f"https://{served.http}", verify=context, timeout=20)


def test_the_right_certificate_samples_over_https(secured: Served, made) -> None:
    with https(secured, made, "ours") as client:
        assert client.get("/health").json() == {"status": "running"}
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True}
        answer = client.post("/v1/completions", json=body)
        assert len(answer.json()["choices"][0]["token_ids"]) == 4
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
    tls = ClientTls(ca=made("ours-ca.pem"), cert=made("ours.pem"), key=made("ours.key"))
    with Rollout.connect(secured.grpc, timeout=10, tls=tls) as rollout:  # the same files there
        assert rollout.generate([[1, 2, 3]])[0].finished
    with pytest.raises(EngineClosed, match="it is an HTTP port; the gRPC port of this service is"):
        Rollout.connect(secured.http, timeout=10, tls=tls)


def test_a_directory_is_followed_beside_tls(secured: Served, runs: Path, made) -> None:
    tls = ClientTls(ca=made("ours-ca.pem"), cert=made("ours.pem"), key=made("ours.key"))
    with Rollout.connect(secured.grpc, timeout=10, tls=tls) as rollout:
        weights = write_tiny(runs / "checkpoint-7", seed=1).state_dict()
        deadline = time.monotonic() + 30
        while rollout.weight_version != 7:
            assert time.monotonic() < deadline, "the checkpoint was not taken"
            time.sleep(0.1)
        assert rollout.check_weights(weights).equal


@pytest.mark.parametrize(("who", "ca"), [(None, "ours"), ("theirs", "ours"), ("ours", "theirs")])
def test_others_do_not_get_in_by_https(secured: Served, made, who, ca) -> None:
    with https(secured, made, who, ca) as client, pytest.raises(httpx.TransportError):
        client.get("/health")


def test_plain_http_is_not_answered(secured: Served) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{secured.http}/health", timeout=10)


def test_clients_that_leave_or_only_stay_are_no_trouble(tmp_path: Path, made, caplog) -> None:
    """Each of these left a dozen warnings; one that keeps an idle connection held up the end."""
    trusting = ssl.create_default_context(cafile=made("ours-ca.pem"))
    tls = ServerTls(cert=made("ours.pem"), key=made("ours.key"))
    write_tiny(tmp_path)
    rollout = AsyncRollout(str(tmp_path), device="cpu", num_threads=1, num_kv_blocks=256)
    body = {"prompt": [1, 2], "n": 64, "max_tokens": 99, "ignore_eos": True, "stream": True}

    def leave(url: str) -> None:
        with client.stream("POST", f"{url}/v1/completions", json=body) as events:
            assert sum(1 for _ in zip(events.iter_lines(), range(100), strict=False)) == 100

    async def course() -> None:
        async with serving(rollout, Listening(tls=tls)) as (http, _):
            for _ in range(4):
                await asyncio.to_thread(leave, f"https://{http}")
            assert (await asyncio.to_thread(client.get, f"https://{http}/live")).is_success

    with httpx.Client(verify=trusting, timeout=20) as client:
        asyncio.run(course())
    assert [one for one in caplog.records if one.name in ("asyncio", "uvicorn.error")] == []


async def _serve(model: Path, tls: ServerTls) -> None:
    async with serving(AsyncRollout(model), Listening(tls=tls)):
        raise AssertionError("it started")


def test_bad_files_are_named_before_anything_is_read(made, tmp_path) -> None:
    for tls, why in (
        (ServerTls(cert="absent", key=made("ours.key")), "absent is no file"),
        (ServerTls(cert=made("ours.pem"), key=made("theirs.key")), "key values mismatch"),
    ):
        with pytest.raises(ConfigError, match=f"TLS files cannot be used: .*{why}"):
            asyncio.run(_serve(tmp_path / "no-model", tls))
