"""Logits that are no numbers: a named end for the sample they belong to, null in JSON, no 500."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from rollout import AsyncRollout, SamplingParams
from rollout.generation import RequestOutput
from rollout.server.http.app import build_app
from rollout.server.http.finite import finite

pytestmark = pytest.mark.asyncio(loop_scope="module")
BAD = 7  # the token whose embedding is NaN
GOOD_PROMPT = list(range(20, 45))
SOME = SamplingParams(max_tokens=4, seed=1, logprobs=1)


SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 1,
    "num_kv_blocks": 8,
    "block_size": 16,
    "max_model_len": 64,
}


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "qwen3", tokenizer=True)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(spoilt: Path) -> AsyncIterator[AsyncRollout]:
    async with AsyncRollout(spoilt, **SETTINGS) as rollout:
        yield rollout


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(engine: AsyncRollout) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=build_app(engine), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


def shown(output: RequestOutput) -> tuple[object, ...]:
    """Logprobs to the digits that do not depend on what else is in a step."""
    sample = output.outputs[0]
    return sample.token_ids, [round(p, 3) for p in sample.logprobs.raw], sample.finish_reason


async def test_only_the_sample_itself_ends_and_what_it_leaves_in_memory_hurts_nobody(
    engine: AsyncRollout,
) -> None:
    [alone] = await engine.generate(GOOD_PROMPT, SOME)
    before = (await engine.metrics()).nan_logits_total
    for round_ in range(4):  # 8 blocks: each round computes in blocks that held NaN
        await engine.reset_prefix_cache()
        bad = [BAD] * (20 + 7 * round_)
        spoilt, good = await engine.generate([bad, GOOD_PROMPT], SOME)
        sample = spoilt.outputs[0]
        assert (sample.finish_reason, sample.stop_reason) == ("error", "nan_logits")
        assert (sample.token_ids, sample.logprobs.raw, sample.text) == ([], [], "")
        assert shown(good) == shown(alone)
    stats = await engine.metrics()
    assert stats.nan_logits_total == before + 4
    assert stats.requests_finished["error"] == stats.nan_logits_total


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_filters_and_penalties_see_a_named_end_too(
    engine: AsyncRollout, temperature: float
) -> None:
    for odd in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"repetition_penalty": 1.5}, {}):
        params = SamplingParams(temperature=temperature, max_tokens=3, **odd)
        [output] = await engine.generate([5, BAD], params)
        assert output.outputs[0].finish_reason == "error"


async def test_the_log_tells_weights_that_give_nan_from_settings_that_leave_no_token(
    spoilt: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line of each for a version: that of a request's own settings stands in for no other."""
    nothing = SamplingParams(allowed_token_ids=[67], bad_words=["a"], temperature=0.0)
    async with AsyncRollout(spoilt, **SETTINGS) as engine:
        outputs = [await engine.generate(*one) for one in ((GOOD_PROMPT, nothing), ([BAD], SOME))]
    ends = [(o.outputs[0].finish_reason, o.outputs[0].stop_reason) for [o] in outputs]
    assert ends == [("error", "nan_logits")] * 2
    said = [
        (r.levelname, r.getMessage())
        for r in caplog.records
        if r.name == "rollout.engine.requests.output"
    ]
    [(first, of_settings), (second, of_weights)] = said
    assert (first, second) == ("WARNING", "ERROR")
    assert "its allowed_token_ids, bad_words, min_tokens" in of_settings
    assert "its logits are NaN under weight version 0" in of_weights


async def test_json_has_null_for_what_is_no_number(http: httpx.AsyncClient) -> None:
    body = {"prompt": [5, BAD, 6], "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1}
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice = strict(reply.text)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("error", "nan_logits")
    assert choice["prompt_logprobs"][2]["6"]["logprob"] is None
    assert "rollout_nan_logits_total" in (await http.get("/metrics")).text


async def test_a_stream_says_it_in_its_last_event(http: httpx.AsyncClient) -> None:
    body = {"prompt": [BAD], "max_tokens": 3, "logprobs": 2, "stream": True}
    reply = await http.post("/v1/completions", json=body)
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert strict(events[-2])["choices"][0]["finish_reason"] == "error"
    assert events[-1] == "[DONE]"


async def test_sglangs_clients_get_an_error_where_they_would_ask_for_the_rest_for_ever(
    http: httpx.AsyncClient,
) -> None:
    """AReaL and slime's partial rollouts send what "abort" left unfinished again."""

    async def post(**body: Any) -> httpx.Response:
        params = {"max_new_tokens": 3, "ignore_eos": True}
        return await http.post("/generate", json={"sampling_params": params, **body})

    alone = await post(input_ids=[5, BAD])
    assert (alone.status_code, alone.json()["error"]["type"]) == (500, "EngineError")
    assert "not numbers" in alone.json()["error"]["message"]
    both = await post(input_ids=[[5, BAD], GOOD_PROMPT])  # one of a batch costs no other
    assert both.status_code == 200, both.text
    ends = [row["meta_info"]["finish_reason"] for row in both.json()]
    assert [end["type"] for end in ends] == ["abort", "length"]
    assert (ends[0]["status_code"], ends[0]["err_type"]) == (500, "nan_logits")


async def test_a_logprob_of_minus_infinity_is_null() -> None:
    """A probability too small for a float32 (and one that a filter made 0) has no logarithm."""
    assert [finite(x) for x in (-1.5, float("-inf"), float("nan"), float("inf"))] == [
        -1.5, None, None, None
    ]  # fmt: skip


def strict(text: str) -> dict[str, object]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found: dict[str, object] = json.loads(text, parse_constant=refuse)
    return found
