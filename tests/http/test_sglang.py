"""SGLang's dialect over plain HTTP: what its clients send, and where they look in the answers."""

from __future__ import annotations

import base64
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from safetensors.torch import save

IDS = [5, 6, 7, 8]
MORE = pytest.mark.more


def generate(http: httpx.Client, **body: Any) -> Any:
    reply = http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_one_prompt_is_answered_as_sglang_does(http: httpx.Client) -> None:
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    ours = http.post(
        "/v1/completions",
        json={"prompt": IDS, "max_tokens": 4, "temperature": 0, "ignore_eos": True,
              "return_token_ids": True, "logprobs": 0},
    ).json()["choices"][0]  # fmt: skip
    row = generate(http, input_ids=IDS, sampling_params=sampling, return_logprob=True, rid="mine")
    meta = row["meta_info"]
    assert row["output_ids"] == ours["token_ids"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 4, 4)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    triples = meta["output_token_logprobs"]
    assert [t[1:] for t in triples] == [[token, None] for token in ours["token_ids"]]
    assert [t[0] for t in triples] == ours["logprobs"]["raw_logprobs"]
    version = str(ours["weight_versions"][-1]["version"])  # the base's, whatever adapters there are
    assert meta["weight_version"] == version
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 4}]
    assert meta["input_token_logprobs"] == []


@pytest.mark.more
def test_logprobs_are_of_the_tempered_model_before_its_filters(http: httpx.Client) -> None:
    """As SGLang's are: top_p changes what is drawn, never the logprob of a token."""
    common = {"sampling_seed": 3, "max_new_tokens": 1, "ignore_eos": True, "top_k": 1}
    plain, first = (
        generate(
            http, input_ids=IDS, sampling_params={**common, "temperature": temperature},
            return_logprob=True, top_logprobs_num=320,
        )["meta_info"]
        for temperature in (1.0, 0.5)
    )  # fmt: skip
    value, token, _ = first["output_token_logprobs"][0]
    raw = {t: p for p, t, _ in plain["output_top_logprobs"][0]}
    assert len(raw) == 320
    tempered = raw[token] / 0.5 - math.log(sum(math.exp(p / 0.5) for p in raw.values()))
    assert value == pytest.approx(tempered, abs=1e-5)


def test_alternatives_are_of_the_tempered_model_too(http: httpx.Client) -> None:
    sampling = {"temperature": 0.5, "top_k": 2, "max_new_tokens": 4, "sampling_seed": 1}
    row = generate(
        http, input_ids=IDS, return_logprob=True, top_logprobs_num=320, sampling_params=sampling
    )["meta_info"]
    pairs = zip(row["output_top_logprobs"], row["output_token_logprobs"], strict=True)
    for ranked, (value, token, _) in pairs:
        assert {t: p for p, t, _ in ranked}[token] == pytest.approx(value, abs=1e-5)
        assert sum(math.exp(p) for p, _, _ in ranked) == pytest.approx(1, abs=1e-5)


def test_a_prompt_is_scored_from_where_the_client_says(http: httpx.Client) -> None:
    whole = http.post(
        "/v1/completions", json={"prompt": IDS, "max_tokens": 1, "prompt_logprobs": 0}
    ).json()["choices"][0]["prompt_logprobs"]
    values = [None] + [whole[i][str(token)]["logprob"] for i, token in enumerate(IDS) if i]
    for start in range(5):
        row = generate(
            http, input_ids=IDS, sampling_params={"max_new_tokens": 0}, return_logprob=True,
            logprob_start_len=start, top_logprobs_num=2, return_text_in_logprobs=True,
        )  # fmt: skip
        meta = row["meta_info"]
        told = meta["input_token_logprobs"]
        assert [token for _, token, _ in told] == IDS[start:]
        for (value, _, _), wanted in zip(told, values[start:], strict=True):
            assert value == (wanted and pytest.approx(wanted, abs=1e-5))
        assert all(isinstance(t[2], str) for t in meta["input_token_logprobs"])
        assert (row["output_ids"], meta["completion_tokens"]) == ([], 0)  # none was asked for
        assert meta["output_token_logprobs"] == []


def test_a_batch_is_a_list_in_order_with_parameters_of_its_own(http: httpx.Client) -> None:
    rows = generate(
        http, text=["Hello", "world"], rid=["a", "b"], return_logprob=[True, False],
        sampling_params=[{"max_new_tokens": 2, "ignore_eos": True},
                         {"max_new_tokens": 3, "ignore_eos": True}],
    )  # fmt: skip
    assert [row["meta_info"]["id"] for row in rows] == ["a", "b"]
    assert [len(row["output_ids"]) for row in rows] == [2, 3]
    assert ["output_token_logprobs" in row["meta_info"] for row in rows] == [True, False]
    many = generate(http, input_ids=IDS, sampling_params={"max_new_tokens": 1, "n": 3})
    assert len(many) == len({row["meta_info"]["id"] for row in many}) == 3


@pytest.mark.parametrize("interval", [None, 8])
def test_a_stream_grows_and_ends_with_a_reason(http: httpx.Client, interval: int | None) -> None:
    sampling = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0}
    sampling["stream_interval"] = interval
    body = {"input_ids": IDS, "stream": True, "return_logprob": True, "sampling_params": sampling}
    lines = [line for line in http.post("/generate", json=body).text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    rows = [json.loads(line[6:]) for line in lines[:-1]]
    lengths = [len(row["output_ids"]) for row in rows]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 20
    assert interval is None or set(lengths) <= {1, 9, 17, 20}
    last = rows[-1]["meta_info"]
    assert last["finish_reason"]["type"] == "length"
    assert len(last["output_token_logprobs"]) == 20
    assert all(row["meta_info"]["finish_reason"] is None for row in rows[:-1])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of 'text' and 'input_ids'"),
    ({"text": "a", "input_ids": IDS}, "exactly one of"),
    ({"input_ids": []}, "prompt"),
    ({"input_ids": IDS, "image_data": ["x"]}, "image_data is not served"),
    ({"input_ids": IDS, "lora_path": "x"}, "there is no adapter 'x'"),
    ({"input_ids": IDS, "retrun_logprob": True}, "did you mean 'return_logprob'"),
    ({"input_ids": IDS, "sampling_params": {"max_tokens": 3}}, "did you mean"),
    ({"input_ids": IDS, "sampling_params": {"temprature": 0}}, "did you mean 'temperature'"),
    ({"input_ids": IDS, "sampling_params": {"stop_regex": "a"}}, "stop_regex is not served"),
    ({"input_ids": IDS, "sampling_params": {"stop_token_ids": 5}}, "stop_token_ids must be a list"),
    ({"input_ids": IDS, "sampling_params": {"top_p": 3}}, "top_p must be"),
    ({"input_ids": IDS, "return_logprob": True, "logprob_start_len": 9}, "logprob_start_len"),
    ({"input_ids": [IDS, IDS], "sampling_params": [{}]}, "sampling_params has 1 entries"),
    ({"input_ids": [5] * 600}, "512"),
]


@pytest.mark.parametrize(("body", "words"), REFUSED, ids=[str(b)[:50] for b, _ in REFUSED])
def test_what_cannot_be_served_is_refused_by_name(
    http: httpx.Client, body: dict[str, Any], words: str
) -> None:
    reply = http.post("/generate", json=body)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]


@pytest.mark.more
def test_grammars_are_the_engines_structured_outputs(http: httpx.Client) -> None:
    sampling = {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": 1}
    row = generate(http, input_ids=IDS, sampling_params={**sampling, "regex": "[0-3]{2}"})
    assert re.fullmatch("[0-3]{2}", row["text"])
    body = {"input_ids": IDS, "sampling_params": {**sampling, "json_schema": "{"}}
    assert http.post("/generate", json=body).status_code == 400


def test_what_asks_for_nothing_is_taken(http: httpx.Client) -> None:
    """AReaL and slime send these with every request."""
    generate(
        http, input_ids=IDS, image_data=[], lora_path=None, return_routed_experts=False,
        stream=False, sampling_params={"max_new_tokens": 1, "top_k": int(1e8), "stop": None,
        "stop_token_ids": [None], "spaces_between_special_tokens": False},
    )  # fmt: skip


def test_what_its_router_adds_to_openais_bodies_is_taken(http: httpx.Client) -> None:
    """sglang-router 0.3 sends these with every request, whatever its client has sent."""
    added = {"no_stop_trim": False, "skip_special_tokens": True, "return_hidden_states": False}
    shared = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": False, **added}
    reply = http.post("/v1/completions", json={"prompt": "w1 w2", "echo": False, **shared})
    assert reply.status_code == 200, reply.text
    text = reply.json()["choices"][0]["text"]
    kept = {**shared, "prompt": "w1 w2", "stop": text[1:3], "no_stop_trim": True}
    ended = http.post("/v1/completions", json=kept).json()["choices"][0]["text"]
    assert ended == text[: text.index(text[1:3]) + 2]
    chat = {**shared, "separate_reasoning": True, "stream_reasoning": True}
    said = {"messages": [{"role": "user", "content": "w1"}], "continue_final_message": False}
    assert http.post("/v1/chat/completions", json={**chat, **said}).status_code == 200
    refused = http.post("/v1/completions", json={**kept, "return_hidden_states": True})
    assert (refused.status_code, "/v1/embeddings" in refused.text) == (400, True)


@pytest.mark.parametrize(
    "mode", [pytest.param("abort", marks=MORE), pytest.param("in_place", marks=MORE), "retract"]
)
def test_a_pause_ends_keeps_or_computes_again(http: httpx.Client, mode: str) -> None:
    sampling = {"max_new_tokens": 300, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": IDS, "sampling_params": sampling, "stream": True}
    with http.stream("POST", "/generate", json=body) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        assert http.post("/pause_generation", json={"mode": mode}).json()["status"] == "ok"
        assert http.get("/health_generate").status_code == 503
        assert http.post("/continue_generation", json={}).json()["status"] == "ok"
        last = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])
    assert http.get("/health_generate").status_code == 200
    reason = last["meta_info"]["finish_reason"]
    assert reason["type"] == ("abort" if mode == "abort" else "length")
    if mode != "abort":
        again = generate(http, input_ids=IDS, sampling_params=sampling)
        assert again["output_ids"] == last["output_ids"]


@pytest.mark.more
def test_a_request_is_aborted_by_its_id(http: httpx.Client) -> None:
    body = {"input_ids": IDS, "rid": "long", "stream": True,
            "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}  # fmt: skip
    with http.stream("POST", "/generate", json=body) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        assert http.post("/abort_request", json={"rid": "long"}).status_code == 200
        last = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])
    assert last["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.more
def test_memory_is_released_and_resumed_by_tags(http: httpx.Client) -> None:
    greedy = {"max_new_tokens": 3, "temperature": 0}
    before = generate(http, input_ids=IDS, sampling_params=greedy)["output_ids"]
    for released in (None, ["kv_cache"], ["weights", "kv_cache", "cuda_graph"]):
        assert http.post("/release_memory_occupation", json={"tags": released}).status_code == 200
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        for tag in ("weights", "kv_cache", "cuda_graph"):
            reply = http.post("/resume_memory_occupation", json={"tags": [tag]})
            assert reply.status_code == 200, reply.text
        assert generate(http, input_ids=IDS, sampling_params=greedy)["output_ids"] == before
    bad = http.post("/release_memory_occupation", json={"tags": ["everything"]})
    assert bad.status_code == 400
    assert bad.json()["object"] == "error"


def test_a_resume_of_what_was_released_serves_again(http: httpx.Client) -> None:
    for steps in (["weights"], ["weights", "kv_cache"], ["cuda_graph"]):
        for tag in steps:
            reply = http.post("/release_memory_occupation", json={"tags": [tag]})
            assert reply.status_code == 200, reply.text
        for number, tag in enumerate(steps):
            asleep = steps[number:] != ["cuda_graph"]
            assert http.get("/is_sleeping").json() == {"is_sleeping": asleep}
            http.post("/resume_memory_occupation", json={"tags": [tag]})
        generate(http, input_ids=IDS, sampling_params={"max_new_tokens": 1})


def test_clients_learn_what_they_ask_for(http: httpx.Client) -> None:
    for path in ("/get_server_info", "/server_info"):
        info = http.get(path).json()
        assert (info["tp_size"], info["pp_size"], info["context_length"]) == (1, 1, 512)
        assert info["disaggregation_mode"] == "null"
    model = http.get("/model_info").json()
    assert (model["model_path"], model["is_generation"]) == ("tiny", True)
    for method in ("GET", "POST"):
        assert http.request(method, "/flush_cache").status_code == 200


def test_slime_connects_to_an_engine_that_it_has_not_started(http: httpx.Client) -> None:
    """It infers these sizes, and holds the engine to flags of its own (``sglang_engine.py``)."""
    info = http.get("/server_info").json()
    sizes = {"tp_size": 1, "pp_size": 1, "ep_size": 1, "num_gpus": 1, "disaggregation_mode": "null"}
    flags = {"enable_memory_saver": False, "enable_return_routed_experts": True}
    assert {name: info.get(name) for name in sizes | flags} == sizes | flags


def test_slime_aborts_until_the_engine_is_idle(http: httpx.Client) -> None:
    def load() -> int:
        reply = http.get("/v1/loads", params={"include": "core"})
        assert reply.status_code == 200, reply.text
        [one] = reply.json()["loads"]
        return int(one["num_running_reqs"]) + int(one["num_waiting_reqs"])

    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    assert load() == 0
    http.post("/pause_generation", json={"mode": "in_place"})
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(http.post, "/generate", json=body)
            while load() == 0:
                assert not answer.done()
            assert load() == 1
            http.post("/abort_request", json={"abort_all": True})
            assert load() == 0
            assert answer.result().status_code == 200
    finally:
        http.post("/continue_generation", json={})


def test_pickles_are_refused_with_what_to_send_instead(http: httpx.Client) -> None:
    body = {"serialized_named_tensors": ["gASVAAAA"], "load_format": None}
    reply = http.post("/update_weights_from_tensor", json=body)
    assert reply.status_code == 400
    assert reply.json()["success"] is False
    assert "safetensors" in reply.json()["message"]


def test_a_refused_update_says_so_in_sglangs_shape(http: httpx.Client) -> None:
    import torch

    text = base64.b64encode(save({"model.nonsense": torch.ones(3)})).decode()
    body = {"serialized_named_tensors": [text], "load_format": "safetensors"}
    for path, given, words in (
        ("/update_weights_from_tensor", body, "model.nonsense"),
        ("/update_weights_from_disk", {"model_path": "/etc"}, "weight-dir"),
        ("/update_weights_from_disk", {"model_path": "/tmp/\0x"}, "no path has a null byte"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/begin_weight_update", {}, "group"),
        ("/end_weight_update", {}, "no weight update is open"),
        ("/destroy_weights_update_group", {}, "in no transfer group"),
        ("/weights_checker", {"action": "snapshot"}, "snapshot"),
    ):
        reply = http.post(path, json=given)
        assert (reply.status_code, reply.json()["success"]) == (400, False), reply.text
        assert words in reply.json()["message"]


def test_a_misspelt_field_of_a_verb_is_named(http: httpx.Client) -> None:
    for path, body, words in (
        ("/pause_generation", {"mod": "in_place"}, "unknown field 'mod'; did you mean 'mode'?"),
        ("/abort_request", {"request_ids": ["a"]}, "give rid, the id of a request, or abort_all"),
        ("/update_weights_from_disk", {"model_path": "x", "flush_cach": False}, "'flush_cache'?"),
    ):
        reply = http.post(path, json=body)
        assert reply.status_code == 400
        assert words in reply.json()["message"]
    assert http.get("/is_paused").json() == {"is_paused": False}
    taken = {"mode": "in_place", "torch_empty_cache": True}  # a field of SGLang's own
    assert http.post("/pause_generation", json=taken).status_code == 200
    assert http.post("/continue_generation").status_code == 200
