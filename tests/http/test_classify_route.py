"""``/classify`` and ``/pooling`` in vLLM's bodies, ``/classify`` in SGLang's."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from tiny_models import write_tiny

from rollout import AsyncRollout
from rollout.server.http.app import build_app

NAMES = ("good", "bad", "neither")
IDS = [[1, 2, 3], [(7 * n) % 300 + 3 for n in range(40)]]
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "One two three"}]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Any, ...]]:
    """An engine, an HTTP client of its server, and transformers' model."""
    path = tmp_path_factory.mktemp("judge")
    model = write_tiny(path, labels=3, tokenizer=True, id2label=dict(enumerate(NAMES)))
    async with AsyncRollout(
        str(path), device="cpu", num_threads=1, num_kv_blocks=64, max_model_len=256,
        served_model_name="judge",
    ) as engine:  # fmt: skip
        transport = httpx.ASGITransport(app=build_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
            yield engine, http, model


def wanted(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return found


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_vllms_classify_has_its_shape_and_transformers_numbers(judge: Any) -> None:
    engine, http, model = judge
    answer = await post(http, "/classify", model="judge", input=IDS, request_id="mine")
    assert (answer["id"], answer["object"], answer["model"]) == ("mine", "list", "judge")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 43
    version = await engine.weight_version
    for index, (row, ids) in enumerate(zip(answer["data"], IDS, strict=True)):
        logits = wanted(model, ids)
        assert row["probs"] == pytest.approx(logits.softmax(-1).tolist(), abs=1e-5)
        assert row["logits"] == pytest.approx(logits.tolist(), abs=1e-4)
        assert (row["index"], row["num_classes"]) == (index, 3)
        assert row["label"] == NAMES[int(logits.argmax())]
        assert (row["weight_version"], row["is_mixed"]) == (version, False)
    for raw in ({"use_activation": False}, {"activation": False}, {"softmax": False}):
        [row] = (await post(http, "/v1/classify", input=IDS[0], **raw))["data"]
        assert row["probs"] == row["logits"]


async def test_texts_and_conversations_are_what_their_tokens_are(judge: Any) -> None:
    engine, http, model = judge
    [text] = (await post(http, "/classify", input="Hello, world"))["data"]
    ids = await engine.tokenize("Hello, world")
    assert text["logits"] == pytest.approx(wanted(model, ids).tolist(), abs=1e-4)
    [bare] = (await post(http, "/classify", input="Hello", add_special_tokens=False))["data"]
    ids = await engine.tokenize("Hello", add_special_tokens=False)
    assert bare["logits"] == pytest.approx(wanted(model, ids).tolist(), abs=1e-4)
    [chat] = (await post(http, "/classify", messages=CHAT))["data"]
    ids = await engine.tokenize(CHAT, add_generation_prompt=False)
    assert chat["logits"] == pytest.approx(wanted(model, ids).tolist(), abs=1e-4)
    for given in (CHAT, [CHAT]):
        [same] = await engine.classify(given)
        assert (same.prompt_token_ids, same.logits.tolist()) == (ids, chat["logits"])
    [begun] = await engine.classify(CHAT, add_generation_prompt=True)
    assert begun.prompt_token_ids == await engine.tokenize(CHAT)


async def test_pooling_gives_bare_numbers_of_the_last_token_or_of_each(judge: Any) -> None:
    _, http, model = judge
    with torch.no_grad():
        each = model.score(model.model(torch.tensor([IDS[1]])).last_hidden_state[0]).numpy()
    asked = {"input": IDS[1], "use_activation": False}
    [last] = (await post(http, "/pooling", task="classify", **asked))["data"]
    assert (last["object"], last["data"]) == ("pooling", pytest.approx(each[-1], abs=1e-4))
    [probs] = (await post(http, "/pooling", input=IDS[1]))["data"]
    assert probs["data"] == pytest.approx(torch.tensor(each[-1]).softmax(-1).tolist(), abs=1e-5)
    [rows] = (await post(http, "/pooling", task="token_classify", **asked))["data"]
    np.testing.assert_allclose(rows["data"], each, atol=1e-4)
    packed = {"task": "token_classify", "encoding_format": "base64"}
    [row] = (await post(http, "/pooling", **packed, **asked))["data"]
    values = np.frombuffer(base64.b64decode(row["data"]), "<f4").reshape(-1, 3)
    np.testing.assert_allclose(values, each, atol=1e-4)


async def test_sglangs_classify_gives_rewards_as_its_clients_read_them(judge: Any) -> None:
    engine, http, model = judge
    one = await post(http, "/classify", model="judge", input_ids=IDS[0], rid="mine")
    assert one["embedding"] == pytest.approx(wanted(model, IDS[0]).tolist(), abs=1e-4)
    assert (one["meta_info"]["id"], one["meta_info"]["prompt_tokens"]) == ("mine", 3)
    assert one["meta_info"]["epoch"] == (await engine.weight_info()).epoch
    many = await post(http, "/classify", text=["Hello", "One two"])
    assert len(many) == 2
    alone = await post(http, "/classify", text="Hello")
    assert alone["embedding"] == pytest.approx(many[0]["embedding"], abs=1e-5)
    assert (await http.get("/health_generate")).status_code == 200
    assert (await http.get("/get_model_info")).json()["is_generation"] is False


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/classify", {}, "exactly one of 'input' and 'messages'"),
        ("/classify", {"input": "a", "messages": CHAT}, "exactly one of"),
        ("/classify", {"input": "a", "text": "b"}, "exactly one of"),
        ("/classify", {"text": "a", "messages": CHAT}, "exactly one of"),
        ("/classify", {"input": []}, "must not be empty"),
        ("/classify", {"text": []}, "must not be empty"),
        ("/classify", {"input": [10**6]}, "outside the vocabulary"),
        ("/classify", {"input": [[1]] * 2049}, "at most 2048"),
        ("/classify", {"input": "a", "truncate_prompt_tokens": 3}, "send what fits"),
        ("/pooling", {"input": "a", "task": "embed"}, "token_classify"),
        ("/pooling", {"input": "a", "dimensions": 1}, "/v1/embeddings takes dimensions"),
        ("/classify", {"input": ["a", 1]}, "input: give a text, a list of texts, a list of token"),
        ("/pooling", {"input": "a", "encoding": "float"}, "did you mean 'encoding_format'"),
        ("/v1/completions", {"prompt": [1], "max_tokens": 1}, "no LM head: ask it by classify"),
        ("/v1/chat/completions", {"messages": CHAT}, "no LM head: ask it by classify"),
        ("/v1/embeddings", {"input": [1]}, "no LM head: ask it by classify"),
        ("/classify", {"messages": [{"role": "user", "content": "a"}], "text": "b"}, "one of"),
        ("/v1/score", {"prompts": [[1, 2]]}, "no LM head: ask it by classify"),
        ("/generate", {"input_ids": [1]}, "no LM head: ask it by classify"),
    ],
)
async def test_what_cannot_be_done_is_a_bad_request(
    judge: Any, path: str, body: dict[str, Any], says: str
) -> None:
    reply = await judge[1].post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert says in reply.text
    assert (await post(judge[1], "/classify", input=IDS))["data"]
