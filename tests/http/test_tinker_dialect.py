"""Tinker's routes over plain HTTP: futures, and what is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from rollout.server.http.tinker_futures import KeptResults

SAMPLING = {"max_tokens": 3, "temperature": 0.0, "stop": []}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}


def sample(http: httpx.Client, **more: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "sampling_params": SAMPLING, **more}
    return http.post("/api/v1/asample", json=body)


def retrieve(http: httpx.Client, request_id: str) -> httpx.Response:
    return http.post("/api/v1/retrieve_future", json={"request_id": request_id})


def test_a_sample_that_is_sent_again_is_the_same_one(http: httpx.Client) -> None:
    session = http.post("/api/v1/create_session", json={}).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    name = http.post("/api/v1/create_sampling_session", json=body).json()["sampling_session_id"]
    first, again = (
        sample(http, sampling_session_id=name, seq_id=4, num_samples=1).json() for _ in range(2)
    )
    assert first == again
    answers = [retrieve(http, first["request_id"]) for _ in range(2)]
    assert answers[0].headers["content-type"] == "application/x-protobuf"
    assert answers[0].content == answers[1].content
    query = {"sequence_id": first["sample_sequence_ids"][0]}
    told = http.get("/api/v1/weight_versions", params=query).json()
    assert told["versions"] == [0, 0, 0]


def test_results_are_kept_within_bytes_and_for_a_while_after_they_were_told() -> None:
    held = KeptResults(most_bytes=100, asked_seconds=0.0)
    for number in range(4):
        held.keep(str(number), bytes(40))
    assert [str(number) in held for number in range(4)] == [False, False, True, True]
    held.keep("large", bytes(1000))  # which stays alone
    assert ["3" in held, "large" in held] == [False, True]
    assert held.ask("large") == bytes(1000)
    assert "large" not in held
    held.keep("next", bytes(60))
    held.keep("last", bytes(40))
    assert "next" in held


def test_a_sample_that_is_refused_fails_as_its_users_doing(http: httpx.Client) -> None:
    long = {"chunks": [{"tokens": [5] * 600}]}
    begun = sample(http, prompt=long).json()
    answer = retrieve(http, begun["request_id"]).json()
    assert answer["category"] == "user"
    assert "512" in answer["error"]


def test_a_sample_is_cancelled_and_a_strange_one_is_gone(http: httpx.Client) -> None:
    http.post("/pause", params={"mode": "keep"})
    try:
        begun = sample(http).json()["request_id"]
        gone = http.post("/api/v1/cancel_future", json={"request_id": begun}).json()
    finally:
        http.post("/resume")
    assert gone["cancelled"] is True
    assert "cancelled" in retrieve(http, begun).json()["error"]
    assert retrieve(http, "strange").status_code == 410


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"model_path": "tinker://x/sampler_weights/1"}, 400, "model_path"),
        ({"base_model": "another"}, 404, "does not exist"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, 400, "not tokens"),
        ({"prompt_alt_tokens_k": 2}, 400, "prompt_alt_tokens_k"),
        ({"sampling_params": {"temperature": -1}}, 400, "temperature"),
    ],
)
def test_what_is_not_served_is_refused_at_once(
    http: httpx.Client, more: dict[str, Any], status: int, words: str
) -> None:
    reply = sample(http, **more)
    assert reply.status_code == status
    assert words in reply.json()["detail"]


def test_training_is_refused_by_name(http: httpx.Client) -> None:
    reply = http.post("/api/v1/create_model", json={})
    assert reply.status_code == 404
    assert "trains elsewhere" in reply.json()["error"]["message"]
