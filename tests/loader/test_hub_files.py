"""Hub ids: from the cache first, else the files the format needs from a (local) hub server."""

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tiny_models import write_tiny

COMMIT = "a" * 40
READ = """
import sys, torch
from rollout.errors import ConfigError
from rollout.loader import open_checkpoint
from rollout.weights import Box
try:
    with open_checkpoint("some-org/tiny", sys.argv[1] or None, sys.argv[2],
                         token=sys.argv[3] or None) as checkpoint:
        lazy = dict(checkpoint.items())["model.norm.weight"]
        print(checkpoint.load_format, float(lazy.read(Box.full(lazy.shape)).sum()))
except ConfigError as error:
    print("refused", error)
"""


class Hub:
    """The three routes of the hub that a snapshot download uses."""

    def __init__(self, directory, gated_by=None):
        self.requests = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self, directory, gated_by)

            def do_HEAD(self):
                hub.answer(self, directory, gated_by)

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

    def answer(self, request, directory, gated_by):
        path = urlsplit(request.path).path
        if "some-org" in path:
            self.requests.append((request.command, path))
        if gated_by and request.headers.get("Authorization") != f"Bearer {gated_by}":
            reply(request, 401, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/some-org/tiny/revision/"):
            files = [{"rfilename": f.name} for f in sorted(directory.iterdir())]
            body = {"id": "some-org/tiny", "sha": COMMIT, "siblings": files}
            reply(request, 200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        elif path.startswith("/api/models/some-org/tiny/tree/"):
            files = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40}
                for f in sorted(directory.iterdir())
            ]
            reply(request, 200, json.dumps(files).encode(), {"Content-Type": "application/json"})
        elif "/resolve/" in path and (file := directory / path.rsplit("/", 1)[1]).is_file():
            data = file.read_bytes()
            etag = hashlib.sha256(data).hexdigest()
            reply(request, 200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        else:
            reply(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def downloaded(self):
        return {p.rsplit("/", 1)[1] for c, p in self.requests if c == "GET" and "/resolve/" in p}


def reply(request, status, body, headers):
    request.send_response(status)
    for key, value in {**headers, "Content-Length": str(len(body))}.items():
        request.send_header(key, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source")
    model = write_tiny(path, "qwen3")
    (path / "pytorch_model.bin").write_bytes(b"must not be fetched")
    (path / "consolidated.safetensors").write_bytes(b"must not be fetched")
    (path / "picture.png").write_bytes(b"must not be fetched")
    (path / "own.py").write_text("raise SystemExit('code runs only where it is trusted')")
    return path, float(model.model.norm.weight.detach().sum())


def read(home, url, revision="", load_format="auto", token=""):
    """Open the hub id in a fresh process: huggingface_hub reads its settings on import."""
    env = {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1"}
    env |= {"PATH": "/usr/bin:/bin", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-c", READ, revision, load_format, token]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_hub_id_is_fetched_once_with_only_the_files_it_needs(source, tmp_path):
    path, total = source
    hub = Hub(path)
    try:
        assert read(tmp_path, hub.url) == f"safetensors {total}"
        weights, code = "model.safetensors", "own.py"
        assert hub.downloaded() == {"config.json", "generation_config.json", weights, code}
        hub.requests.clear()
        assert read(tmp_path, hub.url) == f"safetensors {total}"
        assert hub.requests == []  # the cache is asked first
    finally:
        hub.close()
    assert "cannot be" in read(tmp_path / "fresh", hub.url)


def test_a_gated_repository_needs_the_callers_token(source, tmp_path):
    path, total = source
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    hub = Hub(copy, gated_by="hf_secret")
    try:
        refused = read(tmp_path / "home", hub.url)
        assert refused.startswith("refused some-org/tiny cannot be downloaded")
        assert "token (HF_TOKEN)" in refused
        assert read(tmp_path / "home", hub.url, "main", token="hf_secret") == f"safetensors {total}"
    finally:
        hub.close()


@pytest.mark.more
def test_a_service_takes_its_token_from_the_environment(source, tmp_path):
    """The revision that was asked for is named where it is not there."""
    path, _ = source
    hub = Hub(path, gated_by="hf_secret")
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "PATH": "/usr/bin:/bin"}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    ports = ("--port", "0", "--grpc-port", "0", "--num-threads", "1", "--num-kv-blocks", "32")

    @contextmanager
    def serving(home, *flags, **more):
        command = [sys.executable, "-m", "rollout", "serve", "some-org/tiny", "--device", "cpu"]
        process = subprocess.Popen(
            [*command, *ports, *flags], env={**env, "HF_HOME": str(home), **more},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=60)

    def refused(*flags, **more):
        with serving(*flags, **more) as process:
            stderr = process.communicate(timeout=270)[1]
            assert process.returncode == 2
            return stderr

    try:
        assert "pass a token (HF_TOKEN)" in refused(tmp_path / "one")
        with serving(tmp_path / "two", HF_TOKEN="hf_secret") as process:
            assert process.stdout.readline().startswith("ready http=")
    finally:
        hub.close()
    offline = refused(tmp_path / "two", "--revision", "v9", HF_HUB_OFFLINE="1")
    assert "not in the hub cache (revision v9)" in offline
