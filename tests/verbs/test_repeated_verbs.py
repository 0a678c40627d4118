"""Clients that send a verb again: a lost reply costs nothing, and nothing that failed goes live."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest
import requests
from proxies import Proxy
from requests.adapters import HTTPAdapter
from sender import Sender, described
from urllib3.util.retry import Retry

VERBS = ("init_weight_transfer_engine", "start_weight_update", "update_weights")
FINISH = "finish_weight_update"


class Retrying:
    """``requests`` behind a proxy that loses replies, with the retries of TRL 1.16's client."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy, self.session = proxy, requests.Session()
        retry = Retry(
            total=5, connect=5, read=5, status=3, status_forcelist=[500, 502, 503],
            backoff_factor=2, allowed_methods=["POST", "GET"],
        )  # fmt: skip
        self.session.mount("http://", HTTPAdapter(max_retries=retry))

    def post(self, path: str, json=None) -> requests.Response:
        return self.session.post(f"http://{self.proxy.address}{path}", json=json or {}, timeout=120)


@pytest.fixture
def client(engine) -> Iterator[Retrying]:
    with Proxy(engine.served.http) as proxy:
        made = Retrying(proxy)
        yield made
        made.session.close()


@pytest.fixture
def lossy(engine, client) -> Iterator[Sender]:
    made = Sender(client, engine.ranks)
    yield made
    made.close()
    engine.http.post("/abort_weight_update")


def replies_are_lost(client: Retrying, *verbs: str) -> None:
    client.proxy.lose += [b"POST /" + verb.encode() for verb in verbs]


def error_of(reply) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["message"]


def test_every_reply_may_be_lost_once_and_the_update_is_one(engine, client, lossy, weights) -> None:
    before = engine.info()["version"]
    tensors = list(weights[1].items())
    replies_are_lost(client, *VERBS, "update_weights", FINISH)
    lossy.init()
    assert lossy.post("start_weight_update").json()["version"] == before + 1
    for part in (tensors[:4], tensors[4:]):
        assert lossy.update(part).json()["num_tensors"] == len(part)
        assert lossy.sent is None
    assert lossy.post(FINISH).json()["version"] == before + 1
    assert client.proxy.lost == 5
    assert engine.info()["version"] == before + 1
    assert engine.rollout.check_weights(dict(weights[1])).equal


def test_a_start_on_other_terms_is_another_trainers(engine, sender, weights) -> None:
    sender.joined()
    begun = sender.post("start_weight_update", {"deadline": 60}).json()
    with httpx.Client(base_url=engine.http.base_url, timeout=60) as other:
        assert other.post("/start_weight_update", json={"deadline": 60}).json() == begun
        for terms in ({}, {"deadline": 60, "timeout": 9}, {"deadline": 60, "in_flight": "wait"}):
            status, why = error_of(other.post("/start_weight_update", json=terms))
            assert status == 409
            assert "a weight update has been open" in why
    assert sender.update(weights[1].items()).status_code == 200
    done = sender.post(FINISH, {"weight_version": "a"}).json()
    assert done["version"] == begun["version"]
    with httpx.Client(base_url=engine.http.base_url, timeout=60) as other:
        for label in ("a", "b"):  # what is live stays under the label that it has
            assert other.post(f"/{FINISH}", json={"weight_version": label}).json() == done


def test_a_finish_without_an_id_is_answered_again_while_its_update_is_live(
    engine, sender, weights
) -> None:
    sender.joined()
    sender.post("start_weight_update")
    assert sender.update(weights[1].items()).status_code == 200
    done = sender.post(FINISH).json()
    assert sender.post(FINISH).json() == done
    engine.rollout.update_weights(dict(weights[2]))
    with httpx.Client(base_url=engine.http.base_url, timeout=60) as other:
        for client in (engine.http, other):
            status, why = error_of(client.post(f"/{FINISH}", json={}))
            assert status == 409
            assert f"went live as version {done['version']}, and version" in why


def test_without_starts_the_same_announcement_is_the_next_update(engine, sender, weights) -> None:
    """Also over another connection: servers close those that were idle for seconds."""
    sender.init()
    before = engine.info()["version"]
    for number, seed in enumerate((1, 2), 1):
        with httpx.Client(base_url=engine.http.base_url, timeout=60) as sender.http:
            assert sender.update(weights[seed].items()).status_code == 200
        sender.http = engine.http
        assert engine.info()["version"] == before + number
        assert engine.rollout.check_weights(dict(weights[seed])).equal


@pytest.mark.more
def test_a_repeat_waits_for_the_verb_that_is_under_way(engine, sender, weights) -> None:
    """Its client gave the first up while the ranks still received."""
    sender.init()
    sender.post("start_weight_update")
    body = {"update_info": described(weights[1].items())}
    first = sender.later(sender.post, "update_weights", body)
    sender.arrived()
    second = sender.later(sender.post, "update_weights", body)
    time.sleep(1)  # in which it arrives, too: once all bytes are there it would be another update
    assert sender.broadcast(list(weights[1].values()), {}) is None
    assert first.result(60).json() == second.result(60).json()
    assert sender.post(FINISH).status_code == 200


@pytest.mark.more
def test_ids_name_an_update_for_good(engine, sender, weights) -> None:
    def verb(name: str, update_id: str, **body):
        return sender.post(name, {"update_id": update_id, **body})

    sender.init()
    tensors = list(weights[2].items())
    begun = verb("start_weight_update", "a").json()
    assert begun["update_id"] == "a"
    assert verb("start_weight_update", "a").json() == begun  # also on the same connection
    assert error_of(verb("start_weight_update", "b"))[0] == 409
    info = {"update_info": described(tensors), "update_id": "a", "index": 0}
    receiving = sender.later(sender.post, "update_weights", info)
    assert sender.broadcast([tensor for _, tensor in tensors], {}) is None
    got = receiving.result(60).json()
    assert sender.post("update_weights", info).json() == got
    assert error_of(verb(FINISH, "b")) == (409, "update b was not started here, or ended long "
                                                "ago: a is open")  # fmt: skip
    assert verb("abort_weight_update", "b").json()["message"] == "Nothing to abort"
    done = verb(FINISH, "a").json()
    sender.post("start_weight_update")  # another one is open by now
    assert verb("start_weight_update", "a").json() == begun
    assert sender.post("update_weights", info).json() == got
    assert verb(FINISH, "a").json() == done
    assert engine.info()["version"] == done["version"]
    assert sender.post("abort_weight_update").json()["message"] == "Weight update aborted"


@pytest.mark.parametrize("start", [True, pytest.param(False, marks=pytest.mark.more)])
def test_a_finish_after_a_failed_update_never_commits(
    engine, client, lossy, weights, start
) -> None:
    """As TRL sends it from a ``finally``; nor does anything make the client try again."""
    engine.rollout.update_weights(dict(weights[1]))
    before = engine.info()
    lossy.init()
    if start:  # else the first update_weights begins one, as in vLLM before it had the verb
        assert lossy.post("start_weight_update", {"update_id": "failing"}).status_code == 200
    wrong = [("model.nonsense.weight", weights[1]["model.norm.weight"])]
    status, why = error_of(lossy.update(wrong))
    assert status == 422
    assert "model.nonsense.weight" in why
    verbs = [(FINISH, {}), *([(FINISH, {"update_id": "failing"})] * start)]
    for verb, body in verbs:
        reply = lossy.post(verb, body)
        assert not reply.raw.retries.history
        status, again = error_of(reply)
        assert status == 409
        assert "model.nonsense.weight" in again
    if start:
        reply = lossy.post("start_weight_update", {"update_id": "failing"})
        assert not reply.raw.retries.history
        status, again = error_of(reply)
        assert status == 409
        assert "an update_id of its own" in again
    assert engine.info() == before


@pytest.mark.more
def test_a_trainer_that_comes_again_to_the_same_port_forms_a_new_group(
    engine, sender, weights
) -> None:
    sender.init()
    port = sender.port
    sender.close()  # its store goes with it
    again = Sender(engine.http, engine.ranks)
    again.port = port
    assert again.init().status_code == 200
    assert again.post("start_weight_update").status_code == 200
    assert again.update(weights[2].items()).status_code == 200
    assert again.post(FINISH).status_code == 200
    again.close()


def test_an_update_of_a_trainer_that_has_gone_does_not_keep_the_next_one_out(
    engine, sender, weights
) -> None:
    assert sender.init().status_code == 200
    before = engine.info()["version"]
    assert sender.post("start_weight_update").status_code == 200
    assert sender.update(list(weights[1].items())[:3]).status_code == 200
    again = Sender(engine.http, engine.ranks)
    reply = again.post("init_weight_transfer_engine", {"init_info": again.init_info})
    assert (reply.status_code, "has been open" in reply.text) == (409, True)
    sender.close()  # between two verbs, and its store goes with it
    assert again.init().status_code == 200
    assert again.post("start_weight_update").status_code == 200
    assert again.update(weights[2].items()).status_code == 200
    assert again.post(FINISH).json()["version"] == before + 1
    assert engine.rollout.check_weights(weights[2]).equal
    again.close()
