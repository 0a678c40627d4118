"""Status, control, errors and tokens over plain HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from serving import Served
from shared_engines import eventually, standing_still

from rollout import Rollout

OK = {"prompt": [5, 6, 7], "max_tokens": 2}
SAID = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": []}, "must not be empty"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [-1]}, "greater than or equal to 0"),
    ({"promt": [1]}, "did you mean 'prompt'"),
    ({**OK, "max_tokens": 0}, "max_tokens"),
    ({**OK, "max_tokens": "many"}, "max_tokens"),
    ({**OK, "temperature": -1}, "temperature"),
    ({**OK, "top_p": 0}, "top_p"),
    ({**OK, "logprobs": False}, "logprobs"),
    ({**OK, "logprobs": 1.5}, "logprobs"),
    ({**OK, "n": 0}, "n must be"),
    ({**OK, "top_k": 10**30}, "top_k must be"),
    ({**OK, "logprobs": 321}, "logprobs must be at most the vocabulary's 320"),
    ({**OK, "prompt_logprobs": 10**30}, "prompt_logprobs must be"),
    ({**OK, "seed": 1 << 63}, "seed must be"),
    ({**OK, "max_tokens": 10**30}, "max_tokens must be"),
    ({**OK, "stream_interval": 0}, "stream_interval must be at least 1"),
    ({**OK, "temperature": 1e300}, "temperature must be"),
    ({**OK, "logit_bias": {str(i): 1 for i in range(65537)}}, "logit_bias must be at most 65536"),
    ({**OK, "stop": ["x"] * 257}, "stop must be at most 256"),
    ({**OK, "min_tokens": 5}, "min_tokens"),
    ({**OK, "n": 2, "best_of": 1}, "best_of must be at least n"),
    ({**OK, "best_of": 3, "stream": True}, "best_of cannot stream"),
    ({**OK, "suffix": "x"}, "suffix is not supported"),
    ({**OK, "guided_json": {}}, "use structured_outputs"),
    ({**OK, "functions": []}, "use tools"),
    ({**OK, "logit_bias": {"x": 1}}, "logit_bias"),
    ({**OK, "stop": [""]}, "stop"),
    ({**OK, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt": [5] * 600}, "512"),
    ({**OK, "priority": 1}, "priority"),
    ({**OK, "stream": True, "stream_options": {"include_usge": True}}, "stream_options"),
]


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"max_completion_tokens": 0}, "max_tokens must be at least 1"),
    ({"max_completion_tokens": 0, "max_tokens": 5}, "max_tokens must be at least 1"),
    ({"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens must be at least 1"),
    ({"echo": True}, "echo is not supported; /v1/completions has it"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs are not available"),
    ({"add_special_tokens": True}, "add_special_tokens: Input should be False"),
]
ASKS: list[tuple[dict[str, Any], Any]] = [  # what would change an answer, and what asks for nothing
    ({"stop_regex": "a"}, ""),
    ({"prompt_embeds": "x"}, None),
    ({"thinking_token_budget": 3}, None),
    ({"repetition_detection": {"max_pattern_size": 4}}, {}),
    ({"custom_logit_processor": "x"}, None),
    ({"structural_tag": "x"}, None),
    ({"documents": [{"text": "a"}]}, []),
    ({"session_params": {"id": "x"}}, {}),
    ({"logprob_token_ids": [1]}, []),
    ({"input_ids": [5, 6]}, []),
    ({"mm_processor_kwargs": {"a": 1}}, {}),
    ({"hidden_state": True}, False),
    ({"prompt_logprobs_start": 2}, 0),
    ({"prompt_temperature": 2.0}, 1.0),
]


CHAT: list[tuple[dict[str, Any], str]] = [
    ({"role": "user"}, "messages[0] needs content"),
    ({"role": "user", "content": None}, "messages[0] needs content"),
    ({"content": "hi"}, "messages[0] needs a role"),
    ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls[0] needs a function"),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        "tool_calls[0].function.arguments is not JSON",
    ),
    ({"role": "user", "content": "a", "tool_calls": [{}]}, "which only an assistant has"),
    ({"role": "assistant", "function_call": {"name": "f"}}, "function_call"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
    ({"role": "user", "content": ["hi"]}, "'str'"),
]


@pytest.mark.parametrize(("message", "words"), CHAT)
def test_a_message_that_is_no_text_is_400(
    http: httpx.Client, message: dict[str, Any], words: str
) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = http.post(path, json={"messages": [message]})
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_half_a_surrogate_pair_is_400(http: httpx.Client, path: str) -> None:
    headers = {"Content-Type": "application/json"}
    reply = http.post(path, content=b'{"prompt": "a \\ud800 b"}', headers=headers)
    assert reply.status_code == 400
    assert "not Unicode text" in reply.json()["error"]["message"]


def test_half_a_surrogate_pair_beside_the_prompt_is_no_500(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    for path, content in (
        ("/v1/completions", b'{"prompt": "a", "request_id": "\\ud800"}'),
        ("/v1/completions", b'{"prompt": "a", "temperatur\\ud800": 1}'),
        (
            "/v1/chat/completions/render",
            b'{"messages": [{"role": "user", "content": "a"}], "request_id": "\\ud800"}',
        ),
        ("/inference/v1/generate", b'{"token_ids": [5], "request_id": "\\ud800"}'),
        ("/generate", b'{"text": "a", "rid": "\\ud800"}'),
        ("/pause_generation", b'{"mod\\ud800": 1}'),
        ("/generate", b'{"text": "a", "rid": ["\\ud800"]}'),
    ):
        reply = http.post(path, content=content, headers=headers)
        assert reply.status_code == 400, reply.text
    body = b'{"input": "a", "max_output_tokens": 1, "metadata": {"a": "\\ud800 \\u00e9"}}'
    reply = http.post("/v1/responses", content=body, headers=headers)
    assert reply.json()["metadata"] == {"a": "\ud800 \u00e9"}


def test_text_parts_are_the_text(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    ids = [
        http.post("/tokenize", json={"messages": [{"role": "user", "content": content}]}).json()
        for content in ("Hello", parts)
    ]
    assert ids[0]["tokens"] == ids[1]["tokens"]


def test_a_bias_that_is_no_number_is_400(http: httpx.Client) -> None:
    body = '{"prompt": [5], "logit_bias": {"5": NaN}}'
    reply = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert "logit_bias" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("body", "words"), BAD_BODIES, ids=[str(b)[:50] for b, _ in BAD_BODIES])
def test_a_bad_body_is_400_in_openai_shape(
    http: httpx.Client, body: dict[str, Any], words: str
) -> None:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == 400


@pytest.mark.parametrize(("body", "words"), BAD_CHATS, ids=[str(b)[:50] for b, _ in BAD_CHATS])
def test_a_bad_chat_is_400(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    answer = http.post("/v1/chat/completions", json={**SAID, **body})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(("asks", "nothing"), ASKS, ids=[next(iter(asks)) for asks, _ in ASKS])
def test_what_would_change_an_answer_is_refused(
    http: httpx.Client, asks: dict[str, Any], nothing: Any
) -> None:
    [name] = asks
    for path, body in (("/v1/completions", OK), ("/v1/chat/completions", SAID)):
        refused = http.post(path, json={**body, **asks})
        assert refused.status_code == 400, refused.text
        assert f"{name} is not supported; " in refused.json()["error"]["message"]
        assert http.post(path, json={**body, name: nothing}).status_code == 200


def test_a_body_of_countless_fields_is_refused_unread(http: httpx.Client) -> None:
    many = {f"unknown{number}": 0 for number in range(2000)}
    halves = [{f"{side}{number}": 0 for number in range(600)} for side in ("one", "other")]
    for path, body in (
        ("/v1/completions", {**OK, **many}),
        ("/v1/chat/completions", {**SAID, **many}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": many}),
        ("/generate", {"input_ids": [5], "sampling_params": many}),
        ("/generate", {"input_ids": [[5], [6]], "sampling_params": halves}),
    ):
        reply = http.post(path, json=body)
        assert reply.status_code == 400, reply.text
        assert "at most 1024" in reply.json()["error"]["message"]


def test_a_prompt_may_do_without_special_tokens(http: httpx.Client) -> None:
    for special in (True, False):
        asked = {"prompt": "Hello", "add_special_tokens": special}
        ids = http.post("/tokenize", json=asked).json()["tokens"]
        body = {**asked, "max_tokens": 1, "return_token_ids": True}
        [choice] = http.post("/v1/completions", json=body).json()["choices"]
        assert choice["prompt_token_ids"] == ids


def test_a_chat_has_its_prompts_logprobs(http: httpx.Client) -> None:
    body = {**SAID, "prompt_logprobs": 1, "return_token_ids": True}
    reply = http.post("/v1/chat/completions", json=body).json()
    scored = {"prompt": reply["prompt_token_ids"], "max_tokens": 1, "prompt_logprobs": 1}
    [choice] = http.post("/v1/completions", json=scored).json()["choices"]
    assert reply["prompt_logprobs"] == choice["prompt_logprobs"]
    refused = http.post("/v1/responses", json={"input": "a", "prompt_logprobs": 1})
    assert "a response has no prompt_logprobs" in refused.text


def test_chunks_of_an_interval_are_fewer_and_add_up_to_the_whole(http: httpx.Client) -> None:
    body = {**OK, "max_tokens": 20, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    [whole] = http.post("/v1/completions", json=body).json()["choices"]
    body |= {"stream": True, "stream_interval": 8}
    lines = http.post("/v1/completions", json=body).text.splitlines()
    parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert len(parts) <= 4
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert parts[-1]["finish_reason"] == "length"


def test_every_chunk_carries_the_usage_so_far_where_asked(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    body = {**OK, "max_tokens": 5, "ignore_eos": True, "stream": True, "stream_options": options}
    lines = http.post("/v1/completions", json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[-1], chunks[-1]["choices"]) == (5, [])
    assert counts[0] < 5 or len(counts) == 2  # all may have come at once
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}


def test_a_config_format_that_is_not_given_is_refused(http: httpx.Client) -> None:
    assert http.get("/server_info", params={"config_format": "json"}).status_code == 200
    reply = http.get("/server_info", params={"config_format": "text"})
    assert reply.status_code == 400
    assert "config_format" in reply.json()["error"]["message"]


def test_broken_json_and_unknown_paths_are_named(http: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    broken = http.post("/v1/completions", content=b'{"prompt": [', headers=headers)
    assert broken.status_code == 400
    assert "not JSON" in broken.json()["error"]["message"]
    missing = http.get("/v2/nothing")
    assert missing.status_code == 404
    assert "/v2/nothing" in missing.json()["error"]["message"]
    for path, instead in (("/v1/rerank", "/classify"), ("/v1/audio/transcriptions", "no audio")):
        missing = http.post(path, json={})
        assert missing.status_code == 404
        assert instead in missing.json()["error"]["message"]
    deep = http.post("/v1/completions", content=b'{"a":' * 20000, headers=headers)
    assert deep.status_code == 400
    assert "nested too deeply" in deep.json()["error"]["message"]


def test_a_misspelt_route_or_method_is_told_what_is_served(http: httpx.Client) -> None:
    for path, meant in (
        ("/v1/completion", "POST /v1/completions"),
        ("/v1/chat/completion", "POST /v1/chat/completions"),
        ("/update_weights_from_dsk", "POST /update_weights_from_disk"),
    ):
        missing = http.post(path, json={})
        assert missing.status_code == 404
        assert f"; did you mean {meant}?" in missing.text
    wrong = http.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "Method Not Allowed: GET /v1/completions; use POST" in wrong.text


def test_health_needs_no_token_and_everything_else_does(served: Served) -> None:
    with httpx.Client(base_url=f"http://{served.http}") as stranger:
        assert stranger.get("/health").json() == {"status": "running"}
        for path in ("/v1/models", "/metrics", "/weight_info"):
            assert stranger.get(path).status_code == 401
        assert stranger.post("/v1/completions", json=OK).status_code == 401


def test_the_sampling_token_cannot_pause(served: Served) -> None:
    headers = {"Authorization": "Bearer sampling-secret"}
    with httpx.Client(base_url=f"http://{served.http}", headers=headers) as sampler:
        assert sampler.post("/v1/completions", json=OK).status_code == 200
        assert sampler.post("/pause").status_code == 401


def test_tokenize_counts_text_and_messages(http: httpx.Client) -> None:
    text = http.post("/tokenize", json={"prompt": "Hello, world!"}).json()
    assert text["count"] == len(text["tokens"]) > 0
    assert text["max_model_len"] == 512
    chat = {"messages": [{"role": "user", "content": "Hello, world!"}]}
    assert http.post("/tokenize", json=chat).json()["count"] > text["count"]
    assert http.post("/tokenize", json={}).status_code == 400


def test_metrics_speak_our_names_and_vllms(http: httpx.Client) -> None:
    before = _metrics(http)
    http.post("/v1/completions", json={**OK, "max_tokens": 5, "ignore_eos": True})
    after = _metrics(http)
    for name in ("rollout_generation_tokens_total", "vllm:generation_tokens_total"):
        assert after[name] - before[name] == 5
    for name in (
        "rollout_running_requests",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    ):
        assert name in after
    assert after["rollout_weight_version"] == http.get("/weight_info").json()["version"]
    assert after["rollout_time_to_first_token_seconds_count"] > 0
    scraped = http.get("/metrics", params={"name[]": ["vllm:num_requests_waiting"]})
    assert "vllm:num_requests_waiting" in scraped.text


def test_weights_and_world_are_described(http: httpx.Client) -> None:
    info = http.get("/weight_info").json()
    assert (info["state"], info["dtype"]) == ("idle", "float32")
    assert info["version"] >= 0  # adapters that other tests have loaded are commits, too
    assert info["num_bytes"] > 0
    assert http.get("/get_world_size").json() == {"world_size": 1}


def test_a_client_that_leaves_frees_the_engine(http: httpx.Client) -> None:
    body = {"prompt": [5, 6], "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 16}
    aborted = _metrics(http)['rollout_requests_finished_total{finished_reason="abort"}']
    with http.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    eventually(lambda: _metrics(http)["rollout_running_requests"] == 0)
    now = _metrics(http)['rollout_requests_finished_total{finished_reason="abort"}']
    assert now == aborted + 16


def test_pause_keeps_a_stream_and_resume_finishes_it(http: httpx.Client, rollout: Rollout) -> None:
    assert http.post("/pause", params={"mode": "nap"}).status_code == 400
    body = {**OK, "max_tokens": 200, "ignore_eos": True, "stream": True}

    def pause() -> None:
        assert http.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}

    with ExitStack() as stack:

        def begin() -> Iterator[str]:
            stream = stack.enter_context(http.stream("POST", "/v1/completions", json=body))
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            return lines

        lines = standing_still(begin, rollout, 1, pause)
        assert http.get("/is_paused").json() == {"is_paused": True}
        assert http.get("/load").json() == {"server_load": 1}
        assert http.get("/health").json() == {"status": "paused"}
        assert http.get("/live").status_code == 200
        assert http.post("/resume").json() == {"status": "resumed"}
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert http.get("/is_paused").json() == {"is_paused": False}


def test_none_but_the_allowed_tokens_come_back(http: httpx.Client) -> None:
    body = {**OK, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    reply = http.post("/v1/completions", json={**body, "allowed_token_ids": [7]}).json()
    assert reply["choices"][0]["token_ids"] == [7] * 4


def test_sleep_and_wake_up_bring_the_same_tokens_back(http: httpx.Client) -> None:
    body = {**OK, "temperature": 0, "return_token_ids": True}
    before = http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    assert http.post("/sleep", params={"level": 1}).status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/v1/completions", json=body).status_code == 503
    assert http.post("/wake_up").status_code == 200
    assert http.post("/reset_prefix_cache").json() == {"success": True}
    after = http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    assert after == before


def _metrics(http: httpx.Client) -> dict[str, float]:
    """Name, and labels other than the model's, to value."""
    found = {}
    for line in http.get("/metrics").text.splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.rpartition(" ")
            key = key.replace('model_name="tiny",', "").replace(',model_name="tiny"', "")
            found[key.replace('{model_name="tiny"}', "")] = float(value)
    return found


def test_prompt_logprobs_and_chat_prompts_come_where_vllm_has_them(http: httpx.Client) -> None:
    body = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 1, "prompt_logprobs": 2}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    for choice, prompt in zip(choices, body["prompt"], strict=True):
        rows = choice["prompt_logprobs"]
        assert rows[0] is None
        for row, token in zip(rows[1:], prompt[1:], strict=True):
            assert str(token) in row
            ranked = sorted(row.values(), key=lambda entry: entry["rank"])
            assert [entry["rank"] for entry in ranked] == list(range(1, len(row) + 1))
            values = [entry["logprob"] for entry in ranked]
            assert values == sorted(values, reverse=True)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    reply = http.post("/v1/chat/completions", json={**chat, "return_token_ids": True}).json()
    ids = http.post("/tokenize", json={"messages": chat["messages"]}).json()["tokens"]
    assert reply["prompt_token_ids"] == ids


def test_prompt_logprobs_come_without_an_answer_too(http: httpx.Client) -> None:
    def values(rows: Any) -> list[Any]:
        return [row and {token: entry["logprob"] for token, entry in row.items()} for row in rows]

    def same(rows: Any, others: Any) -> bool:
        near = [row and pytest.approx(row, abs=1e-5) for row in values(rows)]
        return near == values(others)

    asked = {"temperature": 0, "prompt_logprobs": 2}
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 1, **asked}
    rows = http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    alone = http.post("/v1/completions", json={**body, "max_tokens": 0}).json()["choices"][0]
    assert same(rows, alone["prompt_logprobs"])
    for start in (0, 2):
        sampling = {**asked, "max_tokens": 0, "prompt_logprobs_start": start}
        tokens = {"token_ids": body["prompt"], "sampling_params": sampling}
        reply = http.post("/inference/v1/generate", json=tokens).json()
        assert same([*[None] * start, *rows[start:]], reply["prompt_logprobs"])


def test_what_trl_sends_is_answered_in_the_shape_it_parses(http: httpx.Client) -> None:
    body = {
        "model": "tiny", "prompt": [[5, 6], [7]], "n": 2, "temperature": 0.7, "top_p": 1.0,
        "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 3, "logprobs": 0,
        "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [c["prompt_token_ids"] for c in choices] == [[5, 6], [5, 6], [7], [7]]
    for choice in choices:
        logprobs = choice["logprobs"]
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert logprobs["tokens"] == names
        assert [list(top) for top in logprobs["top_logprobs"]] == [[name] for name in names]
        assert logprobs["token_logprobs"] == logprobs["raw_logprobs"]


def test_processed_alternatives_are_what_could_be_drawn(http: httpx.Client) -> None:
    shaped = {
        "temperature": 0.5, "top_k": 2, "logit_bias": {"9": 4}, "seed": 1, "ignore_eos": True,
        "return_tokens_as_token_ids": True, "logprobs_mode": "processed_logprobs", "max_tokens": 4,
    }  # fmt: skip
    asked = {"prompt": [5, 6, 7], **shaped, "logprobs": 3}
    said = http.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]
    rows = [list(row.items()) for row in said["top_logprobs"]]
    chat = {**SAID, **shaped, "logprobs": True, "top_logprobs": 3}
    entries = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]
    for entry in entries["content"]:
        rows.append([(other["token"], other["logprob"]) for other in entry["top_logprobs"]])
    tokens = [*said["tokens"], *(entry["token"] for entry in entries["content"])]
    values = [*said["processed_logprobs"], *entries["processed_logprobs"]]
    assert len(rows) == 8
    for row, token, value in zip(rows, tokens, values, strict=True):
        assert dict(row)[token] == value
        assert len(row) == 2  # of the three that were asked for
        assert sum(math.exp(p) for _, p in row) == pytest.approx(1, abs=1e-5)


def test_control_routes_take_parameters_from_the_query_or_a_body(http: httpx.Client) -> None:
    paused = {"is_paused": True}
    for asked in (
        {"params": {"mode": "keep", "api-version": "1"}},
        {"json": {"mode": "keep", "timeout": 5}},
    ):
        assert http.post("/pause", **asked).json() == {"status": "paused"}
        assert http.get("/is_paused").json() == paused
        assert http.post("/reset_prefix_cache?reset_running_requests=true").status_code == 200
        assert http.get("/is_paused").json() == paused
        assert http.post("/resume", json={}).json() == {"status": "resumed"}
    assert http.post("/sleep", content='{"level": 1, "mode": "abort"}').json()["level"] == 1
    assert http.post("/wake_up", json={"tags": ["weights"]}).status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/wake_up?tags=kv_cache").status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/pause", {"mod": "keep"}, "unknown parameter 'mod' of /pause; did you mean 'mode'?"),
        ("/pause?wait=1", None, "unknown parameter 'wait' of /pause; known: clear_cache, mode, "),
        ("/pause?mode=keep", {"mode": "wait"}, "mode is in the query and in the body"),
        ("/pause", {"mode": "keep", "timeout": -1}, "timeout: Input should be greater than 0"),
        ("/pause", [1], "the body must be a JSON object of clear_cache, mode, timeout"),
        ("/pause?mode=keep", {"wait_for_inflight_requests": True}, "is mode=wait, not 'keep'"),
        ("/sleep", {"level": 3}, "level must be 1 or 2, got 3"),
        ("/sleep?mode=maybe", None, "sleep mode must be one of keep, wait, abort, got 'maybe'"),
        ("/wake_up", {"tags": ["weight"]}, "unknown tag 'weight'; known: weights, kv_cache"),
        ("/resume", {"mode": "keep"}, "unknown parameter 'mode' of /resume; it takes none"),
        ("/resume?timeout=1", None, "unknown parameter 'timeout' of /resume; it takes none"),
        ("/flush_cache?timeou=1", None, "did you mean 'timeout'?"),
        (
            "/collective_rpc",
            {"method": "sleep", "kwargs": {"level": "x"}},
            "sleep level must be 1 or 2, got 'x'",
        ),
        ("/collective_rpc", {"method": "wake_up", "kwargs": {"tags": 3}}, "tags must be a text"),
    ],
)
def test_parameters_that_would_be_ignored_are_named(http: httpx.Client, path, body, words) -> None:
    reply = http.post(path, json=body) if body is not None else http.post(path)
    assert reply.status_code == 400, reply.text
    told = reply.json()
    assert words in told.get("error", told)["message"]
    assert http.get("/is_paused").json() == {"is_paused": False}
    for added in ("api-version=1", "sdk_version=0.38"):  # by gateways and SDKs
        assert http.post(f"/v1/completions?{added}", json=OK).status_code == 200


def test_a_request_may_bound_its_wait(http: httpx.Client, rollout: Rollout) -> None:
    """For a version that does not come, and behind a pause."""
    later = {**OK, "min_version": 1 << 40, "timeout": 0.2}
    for path, body in (
        ("/v1/completions", later),
        ("/v1/completions", {**later, "stream": True}),
        ("/v1/chat/completions", {**later, "messages": [{"role": "user", "content": "Hi"}]}),
    ):
        given = {key: value for key, value in body.items() if "chat" not in path or key != "prompt"}
        reply = http.post(path, json=given)
        assert (reply.status_code, reply.json()["error"]["type"]) == (409, "VersionConflict")
        assert "within the request's timeout of 0.2 s" in reply.text
    http.post("/pause", json={"mode": "keep"})
    try:
        reply = http.post("/v1/completions", json={**OK, "timeout": 0.2})
        assert (reply.status_code, reply.json()["error"]["type"]) == (504, "DeadlineExceeded")
        assert "aborted: generation is paused until resume_generation()" in reply.text
        eventually(lambda: not rollout.metrics().waiting)
    finally:
        http.post("/resume")
    assert http.post("/v1/completions", json={**OK, "timeout": 100}).status_code == 200
    assert "timeout" in http.post("/v1/completions", json={**OK, "timeout": 0}).text
    refused = http.post("/v1/embeddings", json={"input": "a", "timeout": 3})
    assert "this route has none" in refused.text


def test_weight_bodies_are_refused_in_the_words_of_their_fields(http: httpx.Client) -> None:
    for body, words in (
        ({}, "the body has no update_info"),
        ({"update_info": {}}, "update_info.names: Field required"),
        ({"weight_dir": 3}, "weight_dir: Input should be a valid string"),
        ({"weight_dir": "d", "path": 3}, "path: Extra inputs are not permitted"),
    ):
        reply = http.post("/update_weights", json=body)
        assert reply.status_code == 400
        message = reply.json()["error"]["message"]
        assert words in message
        assert "Body" not in message


def test_a_body_that_curl_sends_as_a_form_is_told_what_it_misses(http: httpx.Client) -> None:
    for content, kind, words in (
        (b'{"prompt": "a"}', "application/x-www-form-urlencoded", "Content-Type: application/json"),
        (b"", "application/json", "the body is missing: send a JSON object"),
        (b'"x"', "application/json", "the body must be a JSON object, not 'x'"),
        (b"[]", "application/json", "the body must be a JSON object, not []"),
    ):
        reply = http.post("/v1/completions", content=content, headers={"Content-Type": kind})
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]
