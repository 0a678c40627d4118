"""What `rollout serve` is told of its answers: under which path, and in which role."""

from __future__ import annotations

import httpx
import pytest
from server_settings import TOKEN

from rollout import AsyncRollout
from rollout.server.auth import Tokens
from rollout.server.http.app import build_app
from rollout.server.http.openai.answer_defaults import AnswerDefaults

PATH = "/behind/a/proxy"
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def test_every_route_also_answers_under_the_root_path_and_asks_for_the_same_token(served) -> None:
    with httpx.Client(base_url=f"http://{served.http}", timeout=30) as client:
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        for path in ("", PATH):
            assert client.get(f"{path}/health").json() == {"status": "running"}
            assert client.get(f"{path}/v1/models").status_code == 401
            assert client.post(f"{path}/sleep", headers=bearer).status_code == 401
            [card] = client.get(f"{path}/v1/models", headers=bearer).json()["data"]
            assert card["id"] == "tiny"
        assert client.get(PATH).text == client.get("/").text
        assert client.get(f"{PATH}s/v1/models", headers=bearer).status_code == 401  # no route


async def test_answers_have_the_role_that_the_server_was_told(served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **GREEDY}
    rollout = AsyncRollout.connect(served.grpc, token=TOKEN)
    app = build_app(rollout, tokens=Tokens(), answers=AnswerDefaults(response_role="rollout"))
    transport = httpx.ASGITransport(app)
    async with rollout, httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        assert whole["choices"][0]["message"]["role"] == "rollout"
        streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
        assert '"role":"rollout"' in streamed.text.replace(" ", "")


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_stop_string_ends_an_answer_and_is_named(http: httpx.Client, route: str) -> None:
    asked = {"prompt": "one two"} if route == "completions" else {
        "messages": [{"role": "user", "content": "one two"}]
    }  # fmt: skip

    def choice(**more: object) -> tuple[str, dict[str, object]]:
        made = http.post(f"/v1/{route}", json={**asked, **GREEDY, **more}).json()["choices"][0]
        return made["text"] if "text" in made else made["message"]["content"], made

    whole, made = choice()
    assert (made["finish_reason"], made["stop_reason"]) == ("length", None)
    stop = whole[2:4]
    cut, made = choice(stop=["never written", stop])
    assert cut == whole[: whole.index(stop)]
    assert (made["finish_reason"], made["stop_reason"]) == ("stop", stop)
    kept, made = choice(stop=stop, include_stop_str_in_output=True)
    assert kept == cut + stop
    ids = http.post(f"/v1/{route}", json={**asked, **GREEDY, "return_token_ids": True}).json()
    token = ids["choices"][0]["token_ids"][2]
    _, made = choice(stop_token_ids=[token])
    assert (made["finish_reason"], made["stop_reason"]) == ("stop", token)
