"""Sequences of requests of clients that cannot run here, as their sources send them."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import httpx
import pytest
from recorded import SKYRL, Request, prime_rl
from serving import serve
from tiny_models import write_tiny

from rollout import Rollout

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("recorded")
    write_tiny(folder / "tiny", "qwen3", tokenizer=True)
    flags = ["--dtype", "float32", "--served-model-name", "tiny", "--weight-dir", str(folder)]
    with serve(folder / "tiny", *flags) as served:
        url = f"http://{served.http}"
        with httpx.Client(base_url=url, timeout=60) as http, Rollout.connect(served.grpc) as r:
            yield http, r, folder


def replay(http: httpx.Client, requests: list[Request]) -> None:
    headers = {"X-Session-ID": "3"}
    for method, path, query, body, wanted in requests:
        reply = http.request(method, path, params=query, json=body, headers=headers)
        assert reply.status_code == 200, (path, reply.text)
        for where, value in wanted.items():
            assert reduce(_at, where.split("."), reply.json()) == value, (path, where)


def _at(document: Any, key: str) -> Any:
    return document[int(key)] if isinstance(document, list) else document[key]


def test_skyrls_requests_are_answered(server) -> None:
    http, _, _ = server
    replay(http, SKYRL)


def test_prime_rls_directory_goes_live_once_its_marker_is_there(server) -> None:
    http, rollout, folder = server
    step: Path = folder / "step_1"
    sent = dict(write_tiny(step, "qwen3", seed=1).named_parameters())
    early = http.post("/update_weights", json={"weight_dir": str(step)})
    assert early.status_code == 422
    assert "STABLE" in early.json()["error"]["message"]
    (step / "STABLE").touch()
    replay(http, prime_rl(str(step)))
    assert rollout.check_weights(sent).equal
    assert http.post("/init_broadcaster", json={}).status_code == 404  # which it tolerates
