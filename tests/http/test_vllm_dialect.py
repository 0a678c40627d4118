"""vLLM's routes for tokens in and out, and what frameworks add to them, over plain HTTP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

IDS = [5, 6, 7, 8]
GREEDY = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"


def test_tokens_in_and_out_with_logprobs_of_both(http: httpx.Client) -> None:
    whole = {"prompt": IDS, **GREEDY, "logprobs": 0, "prompt_logprobs": 1, "return_token_ids": True}
    ours = http.post("/v1/completions", json=whole).json()["choices"][0]
    sampling = {**GREEDY, "logprobs": 0, "prompt_logprobs": 1, "output_kind": 2, "top_k": -1}
    body = {"model": "tiny", "token_ids": IDS, "sampling_params": sampling, "features": None}
    headers = {"X-Session-ID": "a session"}
    reply = http.post(
        "/inference/v1/generate", json={**body, "cache_salt": "0"}, headers=headers
    ).json()
    choice = reply["choices"][0]
    assert choice["token_ids"] == ours["token_ids"]
    content = choice["logprobs"]["content"]
    assert [row["logprob"] for row in content] == ours["logprobs"]["raw_logprobs"]
    assert [row["token"] for row in content] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert reply["prompt_logprobs"] == ours["prompt_logprobs"]
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "stop": 4}]
    assert reply["usage"]["completion_tokens"] == 4


def test_prime_rls_scorer_reads_the_logprob_of_each_token_of_the_prompt(
    http: httpx.Client,
) -> None:
    """It takes the first entry of each row (``utils/client.py``, ``prefill_logprobs``)."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    body = {"model": "tiny", "token_ids": IDS, "sampling_params": sampling}
    first, *rows = http.post("/inference/v1/generate", json=body).json()["prompt_logprobs"]
    assert first is None
    scored = http.post("/v1/score", json={"prompts": [IDS]}).json()["data"][0]
    read = [next(iter(row.values()))["logprob"] for row in rows]
    assert read == pytest.approx(scored["logprobs"], abs=1e-5)
    for row in rows:
        ranked = sorted(row.values(), key=lambda entry: entry["rank"])
        assert [entry["rank"] for entry in ranked] == list(range(1, len(row) + 1))


def test_true_asks_for_one_alternative_as_skyrls_tinker_server_does(http: httpx.Client) -> None:
    """Its ``external_inference.py`` sends ``logprobs: true`` to completions."""

    def completion(count: int | bool) -> Any:
        body = {"model": "tiny", "prompt": IDS, **GREEDY, "return_token_ids": True, "top_k": -1}
        reply = http.post("/v1/completions", json={**body, "n": 1, "seed": 3, "logprobs": count})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["logprobs"]

    def tokens(count: int | bool) -> Any:
        asked = {**GREEDY, "logprobs": count, "prompt_logprobs": count}
        reply = http.post(
            "/inference/v1/generate", json={"token_ids": IDS, "sampling_params": asked}
        )
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["logprobs"], reply.json()["prompt_logprobs"]

    assert completion(True) == completion(1)
    assert tokens(True) == tokens(1)


def test_a_stream_adds_up_and_skyrls_route_answers_the_same(
    http: httpx.Client,
) -> None:
    sampling = {
        "temperature": 1,
        "seed": 4,
        "n": 2,
        "max_tokens": 6,
        "ignore_eos": True,
        "logprobs": 1,
    }
    body: dict[str, Any] = {"token_ids": IDS, "sampling_params": sampling, "model": "tiny"}
    whole = http.post("/inference/v1/generate", json=body).json()["choices"]
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines = http.post("/inference/v1/generate", json=asked).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    *events, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    for choice in whole:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert [t for part in parts for t in part["token_ids"]] == choice["token_ids"]
        content = [row for part in parts for row in part["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts][-1] == "length"
        assert {part["finish_reason"] for part in parts[:-1]} <= {None}
    one = {**body, "sampling_params": {**sampling, "n": 1}}
    skyrl = http.post("/skyrl/v1/generate", json=one).json()["choices"][0]
    plain = http.post("/inference/v1/generate", json=one).json()["choices"][0]
    assert skyrl == {**plain, "routed_experts": None, "rollout_sample_support": None}


def test_without_a_limit_an_answer_goes_on_to_the_models_length(http: httpx.Client) -> None:
    sampling = {"temperature": 0, "ignore_eos": True}
    body = {"token_ids": IDS * 120, "sampling_params": sampling}
    choice = http.post("/inference/v1/generate", json=body).json()["choices"][0]
    assert len(choice["token_ids"]) == 512 - 480


def test_a_chat_is_rendered_to_the_tokens_that_it_would_be(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"messages": messages, **GREEDY, "return_token_ids": True}
    asked = http.post("/v1/chat/completions", json=chat).json()
    rendered = http.post("/v1/chat/completions/render", json=chat).json()
    assert rendered["token_ids"] == asked["prompt_token_ids"]
    again = http.post("/inference/v1/generate", json=rendered).json()
    assert again["choices"][0]["token_ids"] == asked["choices"][0]["token_ids"]
    text = http.post("/detokenize", json={"model": "tiny", "tokens": rendered["token_ids"]}).json()
    assert "Hi" in text["prompt"]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": IDS, "features": {"a": 1}}, "features"),
    ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"top_q": 1}}, "top_q"),
    (
        "/inference/v1/generate",
        {"token_ids": IDS, "sampling_params": {"max_tokens": 0}},
        "at least",
    ),
    ("/skyrl/v1/generate", {"token_ids": IDS, "stream": True}, "does not stream"),
    ("/skyrl/v1/generate", {"token_ids": IDS, "return_sample_support": True}, "return_sample"),
    (
        "/skyrl/v1/generate",
        {
            "token_ids": IDS,
            "return_sample_support": True,
            "sampling_params": {"top_k": 40_000_000, "max_tokens": 2},
        },
        "smaller top_k",
    ),
    (
        "/inference/v1/generate",
        {"token_ids": IDS, "sampling_params": {"temprature": 0.0}},
        "did you mean 'temperature'",
    ),
    (
        "/inference/v1/generate",
        {"token_ids": IDS, "sampling_params": {"hidden_state": True}},
        "hidden_state is not supported",
    ),
    (
        "/inference/v1/generate",
        {"token_ids": IDS, "sampling_params": {"prompt_logprobs": 0}, "stream": True},
        "prompt_logprobs are not available",
    ),
    ("/collective_rpc", {"method": "execute_model"}, "'execute_model' is not served"),
    ("/collective_rpc", {"method": "skyrl_set_lora_receive_target"}, "set trainer.policy.model."),
    ("/collective_rpc", {"method": "sleep", "args": [2]}, "takes by name: level"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/update_weights", {"weight_dir": "/nowhere"}, "outside every --weight-dir"),
]


@pytest.mark.parametrize(("path", "body", "words"), BAD)
def test_what_is_not_served_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], words: str
) -> None:
    reply = http.post(path, json=body)
    assert 400 <= reply.status_code < 500
    assert words in reply.json()["error"]["message"]


def test_named_methods_are_the_verbs(http: httpx.Client) -> None:
    def call(method: str, **kwargs: Any) -> Any:
        return http.post("/collective_rpc", json={"method": method, "kwargs": kwargs}).json()

    assert call("reset_prefix_cache") == {"results": [None]}
    assert call("skyrl_sleep_for_weight_sync", offload_kv=True) == {"results": [None]}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    for tag in ("weights", "kv_cache"):
        assert call("skyrl_wake_for_weight_sync", tags=[tag]) == {"results": [None]}
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_a_session_that_is_finished_is_gone(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    http.post("/v1/chat/completions", json=chat, headers={"X-Session-ID": "mine"})
    told = [http.post("/finish_session", params={"session_id": "mine"}).json() for _ in range(2)]
    assert [row["ended"] for row in told] == [True, False]


def test_every_figure_of_the_dashboard_is_one_that_the_server_gives(http: httpx.Client) -> None:
    http.post("/inference/v1/generate", json={"token_ids": IDS, "sampling_params": GREEDY})
    given = {line.split("{")[0].split(" ")[0] for line in http.get("/metrics").text.splitlines()}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [t["expr"] for panel in panels for t in panel.get("targets", ())]
    assert len(asked) >= 10
    for expr in asked:
        names = set(re.findall(r"\brollout_\w+", expr))
        assert names
        assert names <= given, expr
