"""``modelscope://owner/name``: the two routes of its API, by a local server that speaks them."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import write_tiny

from rollout import Rollout
from rollout.errors import ConfigError
from rollout.loader import resolve_model

CPU = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 8, "dtype": "float32"}


class ModelScope:
    """Revisions of one model, each a directory; ``damaged``: files whose last byte is another."""

    def __init__(self, revisions: dict[str, Path], token: str | None = None) -> None:
        self.requests: list[str] = []
        self.damaged: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                route = urlsplit(self.path)
                asked = {name: values[0] for name, values in parse_qs(route.query).items()}
                hub.requests.append(asked.get("FilePath", "files"))
                directory = revisions.get(asked["Revision"])
                right = token is None or self.headers.get("Authorization") == f"Bearer {token}"
                if directory is None or not right or "/models/some-org/tiny/" not in route.path:
                    self.reply(404 if right else 401, b"{}")
                elif route.path.endswith("/repo/files"):
                    rows = [row(file) for file in sorted(directory.iterdir())]
                    rows.append({"Path": "figures", "Type": "tree", "Size": 0})
                    body = {"Code": 200, "Success": True, "Data": {"Files": rows}}
                    self.reply(200, json.dumps(body).encode())
                else:
                    data = (directory / asked["FilePath"]).read_bytes()
                    end = b"\x07" if asked["FilePath"] in hub.damaged else data[-1:]
                    self.reply(200, data[:-1] + end)

            def reply(self, status, body):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def row(file: Path) -> dict[str, object]:
    data = file.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    return {
        "Path": file.name,
        "Name": file.name,
        "Type": "blob",
        "Size": len(data),
        "Sha256": sha256,
    }


@pytest.fixture
def hub(tmp_path, monkeypatch):
    for revision, seed in (("master", 0), ("v2", 2)):
        write_tiny(tmp_path / revision, "qwen3", seed=seed, tokenizer=True)
        (tmp_path / revision / "picture.png").write_bytes(b"must not be fetched")
        (tmp_path / revision / "pytorch_model.bin").write_bytes(b"must not be fetched")
    hub = ModelScope({name: tmp_path / name for name in ("master", "v2")}, token="ms_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MODELSCOPE_DOMAIN", hub.url)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms_secret")
    yield hub
    hub.close()


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def test_a_model_of_modelscope_is_fetched_once_by_revision_and_served(hub, tmp_path):
    with Rollout("modelscope://some-org/tiny", **CPU) as r:
        assert r.check_weights(weights(tmp_path / "master")).equal
        assert r.generate("The quick")[0].prompt_token_ids
    assert "model.safetensors" in hub.requests
    assert not {"picture.png", "pytorch_model.bin"} & set(hub.requests)
    hub.requests.clear()
    with Rollout("modelscope://some-org/tiny", **CPU) as r:
        assert r.check_weights(weights(tmp_path / "master")).equal
    assert hub.requests == []
    with Rollout("modelscope://some-org/tiny", revision="v2", **CPU) as r:
        assert r.check_weights(weights(tmp_path / "v2")).equal


def test_a_download_that_is_taken_up_again_keeps_no_file_of_an_earlier_upload(hub, tmp_path):
    """Of the same size; what has not changed is not fetched again."""
    hub.damaged.add("tokenizer.json")  # which comes behind the weights
    with pytest.raises(ConfigError, match="came damaged"):
        resolve_model("modelscope://some-org/tiny")
    assert "model.safetensors" in hub.requests
    held = (tmp_path / "master" / "model.safetensors").stat().st_size
    write_tiny(tmp_path / "master", "qwen3", seed=5, tokenizer=True)
    assert (tmp_path / "master" / "model.safetensors").stat().st_size == held
    hub.damaged.clear()
    hub.requests.clear()
    found = resolve_model("modelscope://some-org/tiny")
    wanted = weights(tmp_path / "master")
    assert all(torch.equal(value, wanted[name]) for name, value in weights(found).items())
    assert "model.safetensors" in hub.requests
    assert "config.json" not in hub.requests


def test_what_modelscope_does_not_have_or_send_whole_is_named(hub, monkeypatch, tmp_path):
    for model, revision, match in (
        ("modelscope://some-org/other", None, r"some-org/other \(revision master\).*404"),
        ("modelscope://some-org/tiny", "v9", r"revision v9\).*404"),
        ("modelscope://nothing", None, "write modelscope://owner/name"),
    ):
        with pytest.raises(ConfigError, match=match):
            resolve_model(model, revision)
    hub.damaged.add("model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors came damaged"):
        resolve_model("modelscope://some-org/tiny")
    dummy = resolve_model("modelscope://some-org/tiny", load_format="dummy")
    assert not [file.name for file in dummy.iterdir() if "safetensors" in file.name]
    hub.damaged.clear()
    assert (resolve_model("modelscope://some-org/tiny") / "model.safetensors").is_file()
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "wrong")
    with pytest.raises(ConfigError, match=r"401.*set MODELSCOPE_API_TOKEN"):
        resolve_model("modelscope://some-org/tiny", "v2")
