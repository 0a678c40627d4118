"""``/v1/score``, and what trainers' clients ask of teachers by other routes."""

from __future__ import annotations

import base64
import math
from typing import Any

import httpx
import numpy as np
import pytest

from rollout.integrations.teacher_rows import teacher_rows

PROMPTS = [[5, 6, 7], [8] * 40]
COMPLETIONS = [[9, 10], [11, 12, 13]]


def unpacked(field: dict[str, Any]) -> np.ndarray:
    data = base64.b64decode(field["data"])
    return np.frombuffer(data, field["dtype"]).reshape(field["shape"])


def ask(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    answer = http.post("/v1/score", json={"prompts": PROMPTS, "completions": COMPLETIONS, **fields})
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    assert (whole["object"], whole["model"], whole["usage"]["prompt_tokens"]) == (
        "list",
        "tiny",
        48,
    )
    rows: list[dict[str, Any]] = whole["data"]
    assert [row["index"] for row in rows] == [0, 1]
    return rows


def test_lists_and_packed_bytes_say_the_same_with_the_version(http: httpx.Client) -> None:
    listed = ask(http, top_logprobs=4)
    packed = ask(http, top_logprobs=4, encoding_format="base64")
    for row, same, prompt, made in zip(listed, packed, PROMPTS, COMPLETIONS, strict=True):
        assert (row["start"], row["num_tokens"]) == (len(prompt), len(made))
        assert (row["weight_version"], row["is_mixed"]) == (0, False)
        assert row["weight_versions"] == [{"version": 0, "start": 0, "stop": len(made)}]
        assert same["top_ids"]["dtype"] == "int32"
        assert unpacked(same["top_ids"]).tolist() == row["top_ids"]
        for name in ("logprobs", "top_logprobs", "rest_logprobs"):
            assert same[name]["dtype"] == "float32"
            assert np.allclose(unpacked(same[name]), row[name], atol=1e-5)
        mass = np.exp(row["top_logprobs"]).sum(1) + np.exp(row["rest_logprobs"])
        assert np.allclose(mass, 1, atol=1e-5)
    whole = ask(http, top_logprobs=320)
    assert all(value is None or value < -10 for value in whole[0]["rest_logprobs"])
    last = ask(http, last_n=1)
    assert last[1]["start"] == 42
    assert last[1]["num_cached_tokens"] == 32
    assert last[1]["logprobs"] == pytest.approx(listed[1]["logprobs"][-1:], abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompts": []}, "1 to 2048"),
        ({"prompts": ["a", 1]}, "prompts: give a list of texts or a list of lists of token ids"),
        ({"prompts": [[1], [2]], "completions": [[3], []]}, "completion 1 is empty"),
        ({"temperature": 0.0}, "temperature must be in [1e-5, 1e9], got 0.0"),
        ({"temperature": "hot"}, "temperature"),
        ({"text_1": "a", "text_2": "b"}, "cross-encoder"),
        ({"prompts": [[1]], "completions": [[10**6]]}, "outside the vocabulary"),
        ({"prompts": [[1]], "completions": [[-1]]}, "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_scored_is_a_400_that_says_why(
    http: httpx.Client, fields: dict[str, Any], says: str
) -> None:
    body = {"prompts": PROMPTS, "completions": COMPLETIONS, **fields}
    answer = http.post("/v1/score", json=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_trls_teacher_request_is_scored_at_its_temperature_where_processed_ones_are_asked_for(
    http: httpx.Client,
) -> None:
    rows = ask(http, top_logprobs=3, temperature=2.0)
    sequences = [[*p, *c] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    body = {"model": "tiny", "prompt": sequences, "max_tokens": 1, "temperature": 2.0,
            "prompt_logprobs": 3, "logprobs_mode": "processed_logprobs"}  # fmt: skip
    for processed in (True, False):
        if not processed:
            del body["logprobs_mode"]
        choices = http.post("/v1/completions", json=body).json()["choices"]
        for choice, row in zip(choices, rows, strict=True):
            got = choice["prompt_logprobs"][row["start"] :]
            best = [sorted(one.items(), key=lambda item: item[1]["rank"])[:3] for one in got]
            assert [[int(token) for token, _ in one] for one in best] == row["top_ids"]
            values = [[entry["logprob"] for _, entry in one] for one in best]
            assert np.allclose(values, row["top_logprobs"], atol=1e-5) == processed


def test_sglangs_prefill_alone_scores_from_where_it_says(http: httpx.Client) -> None:
    [_, row] = ask(http, top_logprobs=2)
    body = {
        "input_ids": [*PROMPTS[1], *COMPLETIONS[1]], "return_logprob": True,
        "logprob_start_len": 40, "top_logprobs_num": 2, "sampling_params": {"max_new_tokens": 0},
    }  # fmt: skip
    answer = http.post("/generate", json=body).json()
    meta = answer["meta_info"]
    assert (answer["output_ids"], meta["completion_tokens"]) == ([], 0)
    assert (meta["cached_tokens"], meta["weight_version"]) == (32, "0")
    assert [token for _, token, _ in meta["input_token_logprobs"]] == COMPLETIONS[1]
    values = [value for value, _, _ in meta["input_token_logprobs"]]
    assert values == pytest.approx(row["logprobs"], abs=1e-5)
    assert [[t for _, t, _ in one] for one in meta["input_top_logprobs"]] == row["top_ids"]
    one = http.post("/generate", json={**body, "input_ids": [3], "logprob_start_len": 0}).json()
    assert [t[:2] for t in one["meta_info"]["input_token_logprobs"]] == [[None, 3]]


def test_verls_rows_are_of_the_token_after_each_and_padded_at_the_end() -> None:
    rows = [None, {7: -0.1, 4: -2.5}, {3: -0.2, 9: -1.0, 5: -4.0}]
    assert teacher_rows([1, 4, 5], rows, 2) == (
        [[7, 4], [3, 9], [0, 0]],
        [[-0.1, -2.5], [-0.2, -1.0], [0.0, 0.0]],
    )
    assert teacher_rows([1, 4, 5], rows, 0) == ([[4], [5], [0]], [[-2.5], [-4.0], [0.0]])
    assert not math.isnan(teacher_rows([1, 2], [None, None], 1)[1][0][0])


def test_a_language_model_classifies_nothing(http: httpx.Client) -> None:
    for path in ("/classify", "/pooling"):
        answer = http.post(path, json={"input": [1, 2]})
        assert answer.status_code == 400
        assert "ForSequenceClassification" in answer.text
