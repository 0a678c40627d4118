"""How old a request's weights may be, and which it ends on: as bodies and headers say it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served, serve
from shared_engines import eventually, standing_still
from tiny_models import write_tiny

from rollout import AsyncRollout, Rollout
from rollout.server.http.app import build_app

IDS = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
SAID = {"role": "user", "content": "Hi"}
CHAT = {"messages": [SAID], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
LONG = {**IDS, "max_tokens": 400, "group_id": "g"}
ENGINE = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An update with these weights changes the version alone."""
    path = tmp_path_factory.mktemp("same")
    return path, write_tiny(path, "qwen3", tokenizer=True)


@pytest.fixture(scope="module")
def served(model: tuple[Path, Any]) -> Iterator[Served]:
    """One of these tests' own: they update it."""
    with serve(model[0], "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{served.http}", timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def rollout(served: Served) -> Iterator[Rollout]:
    with Rollout.connect(served.grpc) as made:
        yield made


def versions(choice: dict[str, Any]) -> set[int]:
    return {span["version"] for span in choice["weight_versions"]}


SGLANG = {"input_ids": IDS["prompt"], "sampling_params": {"max_new_tokens": 4}}
SAMPLED = {
    "/v1/completions": IDS,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4},
    "/generate": SGLANG,
    "/inference/v1/generate": {"token_ids": IDS["prompt"], "sampling_params": {"max_tokens": 4}},
}


def stamps(answer: Any) -> list[dict[str, Any]]:
    """Whatever in it has versions of weights."""
    if isinstance(answer, list):
        return [found for each in answer for found in stamps(each)]
    if not isinstance(answer, dict):
        return []
    own = [answer] if {"weight_version", "weight_versions"} & answer.keys() else []
    return own + stamps(list(answer.values()))


@pytest.mark.parametrize("path", SAMPLED)
def test_answers_say_in_which_epoch_their_versions_count(
    path: str, http: httpx.Client, rollout: Rollout
) -> None:
    epoch = rollout.weight_info().epoch
    [whole] = stamps(http.post(path, json=SAMPLED[path]).json())
    assert whole["epoch"] == epoch
    reply = http.post(path, json={**SAMPLED[path], "stream": True})
    events = [row.removeprefix("data: ") for row in reply.text.splitlines() if "data: {" in row]
    parts = [part for row in events for part in stamps(json.loads(row)) if part["weight_versions"]]
    assert parts, reply.text
    assert {part["epoch"] for part in parts} == {epoch}


def test_a_request_runs_once_the_version_is_live_that_it_asks_for(
    http: httpx.Client, rollout: Rollout, model: tuple[Path, Any]
) -> None:
    live, epoch = rollout.weight_version, rollout.weight_info().epoch
    later = {"min_version": live + 1, "min_version_epoch": epoch}
    asked = {"/v1/completions": IDS, "/v1/chat/completions": CHAT}

    def post(path: str, more: dict[str, int]) -> httpx.Response:
        return http.post(path, json={**asked[path], **more})

    for path in asked:
        for reply in (post(path, {"min_version": live}), post(path, {"min_version_epoch": epoch})):
            assert versions(reply.json()["choices"][0]) == {live}, reply.text
        reply = post(path, {**later, "min_version_epoch": epoch + 1})
        assert (reply.status_code, reply.json()["error"]["type"]) == (409, "EngineRestarted")
        assert f"and this is epoch {epoch}" in reply.text
    with ThreadPoolExecutor(len(asked)) as pool:
        waits = [pool.submit(post, path, later) for path in asked]
        assert versions(post("/v1/completions", {}).json()["choices"][0]) == {live}
        assert not any(one.done() for one in waits)
        rollout.update_weights(model[1], timeout=20)
        for one in waits:
            assert versions(one.result(60).json()["choices"][0]) == {live + 1}


def test_a_request_that_asks_for_it_is_pinned_and_its_group_with_it(
    http: httpx.Client, rollout: Rollout, model: tuple[Path, Any]
) -> None:
    live = rollout.weight_version
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:

        def begin() -> Iterator[str]:
            body = {**LONG, "pin": True, "stream": True}
            stream = stack.enter_context(http.stream("POST", "/v1/completions", json=body))
            lines = stream.iter_lines()
            assert next(lines).startswith("data: {")
            return lines

        lines = standing_still(begin, rollout, 1)
        try:
            rollout.update_weights(model[1], timeout=20)
            late = pool.submit(http.post, "/v1/completions", json={**LONG, "max_tokens": 4})
            eventually(lambda: rollout.metrics().waiting == 1)
        finally:
            rollout.resume_generation()
        other = http.post("/v1/completions", json=IDS).json()["choices"][0]
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        group = [late.result(60).json()["choices"][0], chunks[-1]["choices"][0]]
    assert [versions(choice) for choice in group] == [{live}, {live}]
    assert versions(other) == {live + 1}


async def test_a_session_by_its_header_reads_what_its_turns_have_seen(
    model: tuple[Path, Any],
) -> None:
    """In another epoch it is told so before anything is generated."""
    # The second is there before the first goes: nobody else takes the port meanwhile.
    with Rollout(str(model[0]), **ENGINE) as second, Rollout(str(model[0]), **ENGINE) as first:
        address, epoch = first.address, first.weight_info().epoch
        client = AsyncRollout.connect(address)
        app = httpx.ASGITransport(build_app(client))
        async with httpx.AsyncClient(transport=app, base_url="http://here") as http:

            async def turn(name: str, *said: dict[str, str], **more: Any) -> httpx.Response:
                body = {**CHAT, "messages": [*said, SAID], **more}
                headers = {"X-Session-ID": name}
                return await http.post("/v1/chat/completions", json=body, headers=headers)

            first.update_weights(model[1])
            begun = (await turn("a")).json()["choices"][0]
            assert versions(begun) == {1}
            history = (SAID, begun["message"])
            assert (await turn("a", *history)).status_code == 200
            first.shutdown()
            assert second.serve(port=int(address.rsplit(":")[-1])) == address
            reply = await turn("a", *history)
            assert (reply.status_code, reply.json()["error"]["type"]) == (
                409,
                "EngineRestarted",
            )
            assert f"version 1 of epoch {epoch} was asked for" in reply.text
            assert second.metrics().prompt_tokens_total == 0
            assert versions((await turn("b")).json()["choices"][0]) == {0}
        await client.shutdown()
