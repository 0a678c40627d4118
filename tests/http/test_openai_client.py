"""The real ``openai`` client against a real server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import openai
import pytest
from openai.types import completion_create_params as completion_params
from openai.types import embedding_create_params as embedding_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params
from pydantic import BaseModel
from server_settings import TOKEN
from serving import Served

from rollout import AsyncRollout
from rollout.server.auth import Tokens
from rollout.server.http.app import build_app
from rollout.server.http.openai.chat_body import ChatBody
from rollout.server.http.openai.embeddings import EmbeddingBody
from rollout.server.http.openai.responses_api import _OWN, _RENAMED, _STORED
from rollout.server.http.openai.types import ACCEPTED, NEUTRAL, UNSUPPORTED, CompletionBody

PROMPT = [5, 6, 7, 8]
IDS = {"return_token_ids": True}


def test_a_model_is_retrieved_by_its_name(client: openai.OpenAI) -> None:
    assert client.models.retrieve("tiny") == client.models.list().data[0]
    for name in ("tinier", "org/tiny", "tiny/"):
        with pytest.raises(openai.NotFoundError, match=f"the model '{name}' does not exist; this"):
            client.models.retrieve(name)
    behind = client.with_options(base_url=client.base_url.join("/behind/a/proxy/v1"))
    assert behind.models.retrieve("tiny").id == "tiny"


async def test_names_of_models_may_have_slashes(served: Served) -> None:
    async with AsyncRollout.connect(served.grpc, token=TOKEN) as rollout:
        info = replace(await rollout.server_info(), model="org/tiny")
        rollout.server_info = AsyncMock(return_value=info)
        transport = httpx.ASGITransport(build_app(rollout, tokens=Tokens()))
        async with (
            httpx.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(base_url="http://here/v1", api_key="none", http_client=http) as asks,
        ):
            assert (await asks.models.retrieve("org/tiny")).id == "org/tiny"


def test_token_id_prompts_bring_ids_logprobs_and_versions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=6, temperature=1.0, seed=3, logprobs=0,
        extra_body={**IDS, "ignore_eos": True, "return_tokens_as_token_ids": True},
    )  # fmt: skip
    choice = answer.choices[0].model_dump()
    assert choice["prompt_token_ids"] == PROMPT
    assert len(choice["token_ids"]) == 6
    assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert len(choice["logprobs"]["token_logprobs"]) == 6
    assert choice["logprobs"]["token_logprobs"] == choice["logprobs"]["raw_logprobs"]
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "stop": 6}]
    assert choice["finish_reason"] == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 6)


def test_processed_logprobs_are_those_of_the_sampled_distribution(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=4, temperature=0.5, seed=1, logprobs=0,
        extra_body={"logprobs_mode": "processed_logprobs", "ignore_eos": True},
    )  # fmt: skip
    logprobs = answer.choices[0].model_dump()["logprobs"]
    assert logprobs["token_logprobs"] == logprobs["processed_logprobs"]
    assert logprobs["processed_logprobs"] != logprobs["raw_logprobs"]


def test_several_prompts_and_samples_come_prompt_major(client: openai.OpenAI) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    answer = client.completions.create(
        model="tiny", prompt=prompts, n=3, max_tokens=3, seed=1, extra_body=IDS
    )
    choices = [choice.model_dump() for choice in answer.choices]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [c["prompt_token_ids"] for c in choices] == [prompts[0]] * 3 + [prompts[1]] * 3


def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "Hello, world", "max_tokens": 12, "seed": 11, "n": 2}
    whole = client.completions.create(**asked, logprobs=1, extra_body=IDS)
    texts, ids, logprobs, reasons = ["", ""], [[], []], [[], []], [None, None]
    usage = None
    stream = client.completions.create(
        **asked, logprobs=1, stream=True, stream_options={"include_usage": True}, extra_body=IDS
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in (c.model_dump() for c in chunk.choices):
            texts[choice["index"]] += choice["text"]
            ids[choice["index"]] += choice["token_ids"]
            logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
            reasons[choice["index"]] = choice["finish_reason"]
    choices = [choice.model_dump() for choice in whole.choices]
    assert texts == [choice["text"] for choice in choices]
    assert ids == [choice["token_ids"] for choice in choices]
    assert reasons == [choice["finish_reason"] for choice in choices]
    for streamed, choice in zip(logprobs, choices, strict=True):
        assert streamed == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_chat_answers_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_completion_tokens": 8,
        "seed": 2,
    }
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    message = whole.choices[0]
    assert message.message.role == "assistant"
    assert message.logprobs is not None
    assert message.logprobs.content is not None
    assert all(len(row.top_logprobs) == 2 for row in message.logprobs.content)
    stream = client.chat.completions.create(**asked, stream=True)
    text = "".join(c.delta.content or "" for chunk in stream for c in chunk.choices)
    assert text == message.message.content


def test_models_are_listed_and_an_unknown_one_is_404(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="serves tiny"):
        client.completions.create(model="huge", prompt=PROMPT)


def test_contradictory_parameters_are_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="n must be 1 when using greedy"):
        client.completions.create(model="tiny", prompt=PROMPT, n=2, temperature=0)


def test_a_refused_stream_is_an_error_and_no_stream(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        client.completions.create(model="tiny", prompt=[10**6], stream=True)


@pytest.mark.parametrize("prompt", ["Hello, world", [5, 6, 7, 8]])
def test_echo_brings_the_prompt_and_its_logprobs(
    client: openai.OpenAI, prompt: str | list[int]
) -> None:
    asked = {"model": "tiny", "prompt": prompt, "seed": 1, "logprobs": 2, "extra_body": IDS}
    plain = client.completions.create(**asked, max_tokens=3)
    echoed = client.completions.create(**asked, max_tokens=3, echo=True)
    scored = client.completions.create(**asked, max_tokens=0, echo=True)
    said, whole, alone = (answer.choices[0] for answer in (plain, echoed, scored))
    assert whole.text == alone.text + said.text
    assert whole.logprobs is not None
    assert alone.logprobs is not None
    count = len(said.model_dump()["prompt_token_ids"])
    made = len(said.model_dump()["token_ids"])
    assert len(alone.logprobs.tokens) == count
    assert len(whole.logprobs.tokens) == len(whole.logprobs.text_offset) == count + made
    assert whole.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in whole.logprobs.token_logprobs[1:])
    assert whole.logprobs.token_logprobs[:count] == pytest.approx(
        alone.logprobs.token_logprobs, abs=1e-5
    )
    assert whole.logprobs.token_logprobs[count:] == pytest.approx(
        said.logprobs.token_logprobs, abs=1e-5
    )
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    stream = client.completions.create(**asked, max_tokens=3, echo=True, stream=True)
    parts = [chunk.choices[0] for chunk in stream]
    assert "".join(part.text for part in parts) == whole.text
    offsets = [at for part in parts for at in part.logprobs.text_offset]
    assert offsets == whole.logprobs.text_offset


@pytest.mark.parametrize("more", [{}, {"add_special_tokens": False}])
def test_echo_brings_the_very_text_of_the_prompt(
    http: httpx.Client, more: dict[str, object]
) -> None:
    text = "héllo 你好 😀<|im_end|>"
    ids = http.post("/tokenize", json={"prompt": text, **more}).json()["tokens"]
    body = {"echo": True, "max_tokens": 0, "return_tokens_as_token_ids": True, "logprobs": 0}
    for prompt in (text, ids, [ids, ids]):
        choices = http.post("/v1/completions", json={**body, **more, "prompt": prompt})
        for choice in choices.json()["choices"]:
            assert choice["text"] == text
            assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]


def test_the_best_of_several_samples_is_the_likeliest(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "seed": 1, "logprobs": 0}
    every = client.completions.create(**asked, n=5, extra_body=IDS)
    best = client.completions.create(**asked, n=2, best_of=5, extra_body=IDS)

    def score(choice: openai.types.CompletionChoice) -> float:
        values = choice.logprobs.token_logprobs
        return sum(values) / len(values)

    ranked = sorted(every.choices, key=score, reverse=True)
    assert [c.model_dump()["token_ids"] for c in best.choices] == [
        c.model_dump()["token_ids"] for c in ranked[:2]
    ]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens


def test_fields_that_change_no_answer_are_taken(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "seed": 1}
    plain = client.chat.completions.create(**asked, max_tokens=4)
    more = client.chat.completions.create(
        **asked, max_tokens=4, store=True, metadata={"a": "b"}, user="u", service_tier="auto",
        safety_identifier="s", prompt_cache_key="k", modalities=["text"],
        extra_body={"zzz_of_another_engine": 1},
    )  # fmt: skip
    assert more.choices[0].message.content == plain.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
        client.chat.completions.create(**asked, extra_body={"temprature": 0.5})
    with pytest.raises(openai.BadRequestError, match=r"answers are text"):
        client.chat.completions.create(**asked, modalities=["text", "audio"])


# Of ``/v1/responses``, whose body becomes a chat's; the rest of its fields are a chat's.
RESPONSES = {*_OWN, *_RENAMED, *_STORED}
NOT_OF_MODELS = {"access_programs", "image"}  # of what else OpenAI's service does


@pytest.mark.parametrize(
    ("params", "body", "more"),
    [
        (chat_params.CompletionCreateParamsBase, ChatBody, set()),
        (completion_params.CompletionCreateParamsBase, CompletionBody, set()),
        (embedding_params.EmbeddingCreateParams, EmbeddingBody, set()),
        (responses_params.ResponseCreateParamsBase, ChatBody, RESPONSES),
    ],
)
def test_every_field_of_the_client_is_served_taken_or_refused_by_name(
    params: Any, body: type[BaseModel], more: set[str]
) -> None:
    known = {*body.model_fields, *ACCEPTED, *NEUTRAL, *UNSUPPORTED, *more, *NOT_OF_MODELS}
    assert set(params.__annotations__) - known == set()
