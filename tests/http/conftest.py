"""One server over a tiny model with a tokenizer, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from serving import Served, serve
from tiny_models import write_tiny

TOKEN, CONTROL = "sampling-secret", "control-secret"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model: Path = tmp_path_factory.mktemp("http") / "tiny"
    write_tiny(model, "qwen3", tokenizer=True)
    flags = ("--dtype", "float32", "--served-model-name", "tiny", "--token", TOKEN)
    with serve(model, *flags, "--control-token", CONTROL) as running:
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
