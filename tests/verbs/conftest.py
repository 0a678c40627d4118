"""Servers of one and of two ranks over a tiny model, and weights to send them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
import torch
from sender import Sender
from serving import Served, serve
from shared_engines import left_serving
from tiny_models import write_tiny

from rollout import Rollout

PROMPT = [5, 6, 7, 8]


@dataclass
class Engine:
    """One server, from outside."""

    ranks: int
    replicas: int
    served: Served
    http: httpx.Client
    rollout: Rollout

    @property
    def transport(self) -> str:
        """By which the ranks get what a trainer broadcasts."""
        return "foreign" if self.replicas == 1 else "ipc"

    @property
    def members(self) -> set[str]:
        return {f"replica-{n}" for n in range(self.replicas)} if self.replicas > 1 else set()

    def tokens(self) -> list[int]:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]

    def info(self) -> dict:
        return self.http.get("/weight_info").json()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    where = tmp_path_factory.mktemp("verbs")
    write_tiny(where, "qwen3", tied=True)
    return where


def weights_of(seed: int, tmp_path) -> dict[str, torch.Tensor]:
    made = write_tiny(tmp_path, "qwen3", tied=True, seed=seed)
    return {name: p.detach().clone() for name, p in made.named_parameters()}


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> dict[int, dict[str, torch.Tensor]]:
    """Two other sets of weights, under the names and in the order of ``named_parameters``."""
    return {seed: weights_of(seed, tmp_path_factory.mktemp("other")) for seed in (1, 2)}


@pytest.fixture(
    scope="session",
    params=[(2, 1), pytest.param((1, 2), marks=pytest.mark.more)],
    ids=["tp2", "fleet"],
)
def engine(request, model) -> Iterator[Engine]:
    """One of several ranks, or a fleet of several."""
    ranks, replicas = request.param
    flags = ("--dtype", "float32", "--tensor-parallel-size", str(ranks))
    flags += ("--replicas", str(replicas))
    with (
        serve(model, *flags) as served,
        httpx.Client(base_url=f"http://{served.http}", timeout=180) as http,
        Rollout.connect(served.grpc) as rollout,
    ):
        yield Engine(ranks, replicas, served, http, rollout)


@pytest.fixture(autouse=True)
def _engine_is_left_serving(request) -> Iterator[None]:
    shared = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    yield from left_serving(request.node.name, getattr(shared, "rollout", None))


@pytest.fixture
def sender(engine) -> Iterator[Sender]:
    """Forming a group takes seconds: one that a test leaves whole serves the next one, too."""
    made = Sender.latest
    if made is None or made.http is not engine.http or made.packed or not made.whole:
        made = Sender(engine.http, engine.ranks)
    yield made
    engine.http.post("/abort_weight_update")
    made.whole = made is Sender.latest and made.post("start_weight_update", {}).status_code == 200
    engine.http.post("/abort_weight_update")
    if not made.whole:
        made.close()
