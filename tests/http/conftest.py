"""One server over a tiny model with a tokenizer, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from free_ports import free_port
from qwen_template import QWEN_TEMPLATE
from server_settings import CONTROL, MAX_BODY, OPENED, TOKEN
from serving import Served, serve
from shared_engines import left_serving
from tiny_models import write_tiny

from rollout import Rollout


@pytest.fixture(scope="session")
def open_port() -> int:
    """Of the listener where some routes need no token."""
    return free_port()


@pytest.fixture(scope="session")
def adapter_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server may read adapters."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="session")
def served(
    tmp_path_factory: pytest.TempPathFactory, open_port: int, adapter_dir: Path
) -> Iterator[Served]:
    model: Path = tmp_path_factory.mktemp("http") / "tiny"
    write_tiny(model, "qwen3", tokenizer=True)
    flags = ["--dtype", "float32", "--served-model-name", "tiny", "--token", TOKEN]
    flags += ["--control-token", CONTROL, "--max-body-bytes", str(MAX_BODY)]
    flags += ["--max-adapters", "2", "--weight-dir", str(adapter_dir)]
    template = model.parent / "chat.jinja"
    template.write_text(QWEN_TEMPLATE)
    flags += ["--chat-template", str(template)]
    flags += ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    flags += ["--root-path", "/behind/a/proxy"]
    flags += ["--open-routes", OPENED, "--open-port", str(open_port)]
    with serve(model, *flags) as running:
        yield running


@pytest.fixture(scope="session")
def http(served: Served) -> Iterator[httpx.Client]:
    """May do everything."""
    headers = {"Authorization": f"Bearer {CONTROL}"}
    with httpx.Client(base_url=f"http://{served.http}", headers=headers, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[openai.OpenAI]:
    """The real client, with the token for sampling."""
    url = f"http://{served.http}/v1"
    with openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0, timeout=30) as made:
        yield made


@pytest.fixture(scope="session")
def rollout(served: Served) -> Iterator[Rollout]:
    with Rollout.connect(served.grpc, token=CONTROL) as made:
        yield made


@pytest.fixture(autouse=True)
def _engine_is_left_serving(request: pytest.FixtureRequest) -> Iterator[None]:
    shared = request.getfixturevalue("rollout") if "served" in request.fixturenames else None
    yield from left_serving(request.node.name, shared)
