"""Experts and kept sets over HTTP, in the shapes of SGLang's, vLLM's and SkyRL's clients."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from tiny_models import write_tiny

from rollout import AsyncRollout, SamplingParams
from rollout.generation.packed import pack
from rollout.server.http.app import build_app
from rollout.server.http.openai.answer_defaults import AnswerDefaults

pytestmark = pytest.mark.asyncio(loop_scope="module")
IDS = [5, 6, 7, 8, 9, 10]
MADE = 4
LAYERS, CHOSEN = 3, 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncRollout]:
    """The first of three layers is dense."""
    path = tmp_path_factory.mktemp("side")
    write_tiny(path, "deepseek_v3", num_layers=LAYERS, first_k_dense_replace=1)
    async with AsyncRollout(
        str(path), device="cpu", num_threads=1, num_kv_blocks=16, max_model_len=64,
        skip_tokenizer_init=True,
    ) as rollout:  # fmt: skip
        yield rollout


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(engine: AsyncRollout) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_each_dialect_has_the_experts_in_its_own_shape(
    engine: AsyncRollout, http: httpx.AsyncClient
) -> None:
    asked = {"temperature": 0.0, "max_tokens": MADE, "return_routed_experts": True}
    [output] = await engine.generate([IDS], SamplingParams(**asked))
    own = output.outputs[0].routed_experts
    assert own is not None
    assert own.shape == (len(IDS) + MADE - 1, LAYERS - 1, CHOSEN)
    assert output.sparse_layers == (False, True, True)
    whole = np.concatenate([np.zeros_like(own[:, :1]), own], axis=1)

    sampling = {"temperature": 0, "max_new_tokens": MADE}
    body = {"input_ids": IDS, "sampling_params": sampling, "return_routed_experts": True}
    meta = (await post(http, "/generate", body))["meta_info"]
    found = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    assert (found.reshape(-1, LAYERS, CHOSEN) == whole).all()
    meta = (await post(http, "/generate", body | {"routed_experts_start_len": 4}))["meta_info"]
    found = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    assert (found.reshape(-1, LAYERS, CHOSEN) == whole[4:]).all()
    meta = (await post(http, "/generate", {**body, "return_routed_experts": False}))["meta_info"]
    assert "routed_experts" not in meta

    body = {"token_ids": IDS, "sampling_params": asked}
    [choice] = (await post(http, "/inference/v1/generate", body))["choices"]
    assert (npy(choice["routed_experts"]) == whole).all()
    [choice] = (await post(http, "/skyrl/v1/generate", body))["choices"]
    assert choice["routed_experts"] == pack(whole)
    [choice] = (await post(http, "/v1/completions", {"prompt": IDS, **asked}))["choices"]
    assert (npy(choice["routed_experts"]) == whole).all()
    reply = await http.post("/v1/completions", json={"prompt": IDS, "stream": True, **asked})
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line[6:7] == "{"]
    told = [c["routed_experts"] for e in events for c in e["choices"] if "routed_experts" in c]
    assert len(told) == 1  # with the last tokens
    assert (npy(told[0]) == whole).all()


def npy(text: str) -> Any:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


async def test_a_body_says_which_experts_a_prompt_is_scored_with(http: httpx.AsyncClient) -> None:
    plain = {"prompt": IDS, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0}
    told = pack(np.tile(np.array([0, 5], np.uint8), (len(IDS), LAYERS - 1, 1)))
    free, forced = [
        (await post(http, "/v1/completions", body))["choices"][0]["prompt_logprobs"]
        for body in (plain, plain | {"routed_experts": told})
    ]
    assert free != forced
    refused = await http.post("/v1/completions", json=plain | {"routed_experts": {"data": "AA=="}})
    assert refused.status_code == 400
    assert "must have data (base64), shape and dtype" in refused.text


async def test_each_dialect_has_the_kept_sets_in_its_own_shape(
    engine: AsyncRollout, http: httpx.AsyncClient
) -> None:
    asked = {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 6, "max_tokens": MADE}
    [output] = await engine.generate([IDS], SamplingParams(**asked, return_sampling_mask=True))
    one = output.outputs[0]
    assert one.sampling_mask is not None
    kept = [row.tolist() for row in one.sampling_mask.rows()]
    assert max(map(len, kept)) > 1

    sampling = {"temperature": 0.8, "sampling_seed": 4, "top_p": 0.9, "top_k": 6}
    body = {"input_ids": IDS, "sampling_params": {**sampling, "max_new_tokens": MADE}}
    meta = (await post(http, "/generate", body | {"return_sampling_mask": True}))["meta_info"]
    assert meta["output_token_sampling_mask"] == kept
    assert meta["output_token_sampling_logprobs"] == one.logprobs.processed
    assert meta["output_token_sampling_mask_length"] == MADE

    own = {**asked, "return_sampling_mask": True}
    body = {"token_ids": IDS, "sampling_params": own}
    [choice] = (await post(http, "/inference/v1/generate", body))["choices"]
    assert choice["sampling_mask"] == kept
    reply = await http.post("/inference/v1/generate", json={**body, "stream": True})
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line[6:7] == "{"]
    assert [row for e in events for c in e["choices"] for row in c["sampling_mask"]] == kept
    [choice] = (await post(http, "/v1/completions", {"prompt": IDS, **own}))["choices"]
    assert choice["sampling_mask"] == kept

    own = {**asked, "logprobs": 1}
    body = {"token_ids": IDS, "sampling_params": own, "return_sample_support": True}
    [choice] = (await post(http, "/skyrl/v1/generate", body))["choices"]
    told = [row["logprob"] for row in choice["logprobs"]["content"]]
    assert told == one.logprobs.processed  # as SkyRL's servers have them beside the kept sets
    packed = choice["rollout_sample_support"]
    rows = np.frombuffer(base64.b64decode(packed["data"]), np.int32).reshape(packed["shape"])
    assert (packed["dtype"], rows.shape) == ("int32", (MADE, 6))
    assert rows[:, 0].tolist() == one.token_ids
    assert [sorted(row[row >= 0].tolist()) for row in rows] == kept
    assert "sampling_mask" not in choice


async def test_a_server_may_bring_both_with_every_answer(engine: AsyncRollout) -> None:
    """As vLLM's do by their flags: SkyRL and prime-rl ask for neither in a request."""
    app = build_app(engine, answers=AnswerDefaults(routed_experts=True, sampling_mask=True))
    transport = httpx.ASGITransport(app=app)
    asked = {"temperature": 1.0, "seed": 4, "top_p": 0.9, "max_tokens": MADE}
    body = {"token_ids": IDS, "sampling_params": asked}
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        [plain] = (await post(http, "/v1/completions", {"prompt": IDS, **asked}))["choices"]
        [choice] = (await post(http, "/inference/v1/generate", body))["choices"]
        [skyrl] = (await post(http, "/skyrl/v1/generate", body))["choices"]
    for one in (plain, choice):
        assert npy(one["routed_experts"]).shape == (len(IDS) + MADE - 1, LAYERS, CHOSEN)
        assert len(one["sampling_mask"]) == MADE
    assert skyrl["routed_experts"]["shape"] == [len(IDS) + MADE - 1, LAYERS, CHOSEN]
    assert skyrl["rollout_sample_support"] is None
