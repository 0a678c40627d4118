"""Sequences of requests of clients that cannot run here, as their sources send them."""

from __future__ import annotations

import base64
from functools import reduce
from pathlib import Path
from typing import Any

import httpx
import pytest
from recorded import SKYRL, SKYRL_DELTA, Request, prime_rl
from safetensors.torch import save
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


def test_skyrls_checkpoint_deltas_are_refused_with_what_to_use(server) -> None:
    http, rollout, _ = server
    before = rollout.weight_version
    for path, body in SKYRL_DELTA:
        reply = http.post(path, json=body)
        assert reply.status_code == 400, (path, reply.text)  # not one that is sent again
        error = reply.json()["error"]
        assert error["type"] == "InvalidRequest", path
        for words in ("weight_sync_backend=delta", "weight_sync_backend=nccl", "server_path="):
            assert words in error["message"], (path, error["message"])
    assert (rollout.weight_version, rollout.weight_info().state) == (before, "idle")


def test_prime_rls_directory_goes_live_once_its_marker_is_there(server) -> None:
    http, rollout, folder = server
    step: Path = folder / "step_1"
    sent = dict(write_tiny(step, "qwen3", seed=1).named_parameters())
    early = http.post("/update_weights", json={"weight_dir": str(step)})
    assert early.status_code == 422
    assert "STABLE" in early.json()["error"]["message"]
    assert "set it to filesystem" in early.json()["error"]["message"]
    (step / "STABLE").touch()
    replay(http, prime_rl(str(step)))
    assert rollout.check_weights(sent).equal
    assert http.post("/init_broadcaster", json={}).status_code == 404  # which it tolerates


def test_sglangs_updates_are_made_once_while_they_are_live(server) -> None:
    """A client whose reply was lost sends its request again; another one is another update."""
    http, rollout, folder = server
    model = write_tiny(folder / "disk", "qwen3", seed=2)
    sent = dict(model.named_parameters())

    def live(path: str, **body: Any) -> int:
        reply = http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return rollout.weight_version

    disk = "/update_weights_from_disk"
    told = {"model_path": str(folder / "disk"), "weight_version": "step-1"}
    first = live(disk, **told)
    assert live(disk, **told) == first
    assert rollout.check_weights(sent).equal
    assert live(disk, **{**told, "weight_version": "step-2"}) == first + 1
    assert live(disk, **told) == first + 2  # not the last one any more
    (folder / "disk" / "model.safetensors").touch()
    assert live(disk, **told) == first + 3
    rollout.rollback()
    assert live(disk, **told) == first + 5
    text = base64.b64encode(save({n: t.detach().contiguous() for n, t in sent.items()})).decode()
    body = {"serialized_named_tensors": [text], "load_format": "safetensors"}
    version = live("/update_weights_from_tensor", **body)
    assert (version, live("/update_weights_from_tensor", **body)) == (first + 6, first + 6)
    relabelled = http.post("/update_weight_version", json={"new_version": "named"}).json()
    assert (relabelled["success"], relabelled["new_version"]) == (True, "named")
    assert http.get("/get_weight_version").json() == {"weight_version": "named"}
    assert rollout.weight_version == version
