"""``/v1/embeddings`` by the real ``openai`` client."""

from __future__ import annotations

import math
from typing import Any

import httpx
import openai
import pytest

from rollout import Rollout

IDS = [5, 6, 7, 8]


def test_the_client_parses_what_it_asks_for_by_default_and_as_numbers(
    client: openai.OpenAI, rollout: Rollout
) -> None:
    packed = client.embeddings.create(model="tiny", input=IDS)  # base64, unpacked by the client
    plain = client.embeddings.create(model="tiny", input=IDS, encoding_format="float")
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-7)
    assert len(plain.data[0].embedding) == 64
    assert math.hypot(*plain.data[0].embedding) == pytest.approx(1, abs=1e-5)
    told = plain.data[0].model_dump()
    assert (told["weight_version"], told["epoch"]) == (0, rollout.weight_info().epoch)
    assert (plain.model, plain.usage.prompt_tokens, plain.usage.total_tokens) == ("tiny", 4, 4)


def test_texts_and_lists_of_either_come_back_in_order(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    texts = ["Hello, world", "One two three"]
    ids = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    by_text = client.embeddings.create(model="tiny", input=texts)
    by_ids = client.embeddings.create(model="tiny", input=ids)
    assert [row.index for row in by_text.data] == [0, 1]
    for row, same in zip(by_text.data, by_ids.data, strict=True):
        assert row.embedding == pytest.approx(same.embedding, abs=1e-5)
    assert by_text.usage.prompt_tokens == sum(map(len, ids))
    one = client.embeddings.create(model="tiny", input=texts[1])
    assert one.data[0].embedding == pytest.approx(by_text.data[1].embedding, abs=1e-5)


def test_fewer_dimensions_and_a_mean_are_of_length_1_too(client: openai.OpenAI) -> None:
    whole = client.embeddings.create(model="tiny", input=IDS).data[0].embedding
    short = client.embeddings.create(model="tiny", input=IDS, dimensions=8).data[0].embedding
    length = math.hypot(*whole[:8])
    assert short == pytest.approx([value / length for value in whole[:8]], abs=1e-6)
    mean = client.embeddings.create(model="tiny", input=IDS, extra_body={"pooling": "mean"})
    assert math.hypot(*mean.data[0].embedding) == pytest.approx(1, abs=1e-5)
    assert mean.data[0].embedding != whole


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input": []}, "input must not be empty"),
        ({"input": ""}, "empty"),
        ({"input": ["a", 1]}, "input: give a text, a list of texts, a list of token ids or"),
        ({"input": [1] * 30_000 + ["x"]}, "all of one kind"),  # looked at in seconds, not hours
        ({"input": [[1]] * 2049}, "at most 2048"),
        ({"input": [10**6]}, "outside the vocabulary"),
        ({"input": [1] * 600}, "max_model_len"),
        ({"dimensions": 65}, "1 to 64"),
        ({"extra_body": {"pooling": "max"}}, "pooling"),
        ({"extra_body": {"normalise": False}}, "did you mean 'normalize'"),
        ({"extra_body": {"truncate_prompt_tokens": 3}}, "send what fits"),
    ],
)
def test_what_cannot_be_done_is_a_bad_request(
    client: openai.OpenAI, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.embeddings.create(**{"model": "tiny", "input": IDS, **fields})
    assert caught.value.type
    assert client.embeddings.create(model="tiny", input=IDS, dimensions=64).data


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.embeddings.create(model="large", input=IDS)
