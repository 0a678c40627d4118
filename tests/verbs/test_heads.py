"""A trainer that broadcasts a release's head among the policy's tensors, or behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file
from sender import Sender, described
from serving import serve
from shared_engines import eventually
from tiny_heads import write_release
from torch import Tensor

from rollout import Rollout
from rollout.models.config.model import ModelConfig

Weights = dict[str, Tensor]
DRAFTS = ("--draft-component", "mtp", "--num-speculative-tokens", "2")
TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True, kw_only=True)
class Releases:
    """Files of two trained releases of one model, the first of which is served."""

    where: Path

    @property
    def weights(self) -> tuple[Weights, Weights]:
        one, other = (load_file(self.where / name / "model.safetensors") for name in "ab")
        return one, other

    def part(self, weights: Weights, head: bool) -> Weights:
        further = ModelConfig.from_directory(self.where / "a").further_prefixes
        return {name: t for name, t in weights.items() if name.startswith(further) == head}


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server from outside, and a trainer that has joined its group; ``drafts``: by the head."""

    http: httpx.Client
    rollout: Rollout
    sender: Sender
    drafts: bool

    @property
    def version(self) -> int:
        return int(self.http.get("/weight_info").json()["version"])

    @property
    def state(self) -> str:
        return str(self.http.get("/weight_info").json()["state"])

    def live(self, policy: Weights, head: Weights) -> bool:
        sent = {"policy": policy, **({"mtp": head} if self.drafts else {})}
        return self.rollout.check_weights(sent).equal

    def send(self, weights: Weights) -> None:
        reply = self.sender.update(weights.items())
        assert reply.status_code == 200, reply.text

    def goes_on(self) -> tuple[int, str]:
        reply = self.sender.post("continue_generation", {})
        return reply.status_code, reply.text


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    where = tmp_path_factory.mktemp("releases")
    for seed, name in enumerate("ab"):
        write_release(where / name, "glm4_moe", seed=seed)
    return Releases(where=where)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    where = tmp_path_factory.mktemp("tied")
    for seed, name in enumerate("ab"):
        write_release(where / name, "qwen3_next", seed=seed, **TIED)
    return Releases(where=where)


def serving(releases: Releases, *flags: str) -> Iterator[Served]:
    with (
        serve(releases.where / "a", "--dtype", "float32", *flags) as served,
        httpx.Client(base_url=f"http://{served.http}", timeout=180) as http,
        Rollout.connect(served.grpc) as rollout,
    ):
        sender = Sender(http, 1)
        yield Served(http=http, rollout=rollout, sender=sender, drafts=DRAFTS[0] in flags)
        sender.close()


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.more)])
def drafting(request: Any, releases: Releases) -> Iterator[Served]:
    yield from serving(releases, *DRAFTS, "--replicas", str(request.param))


@pytest.fixture(scope="module", params=["device", "none", "fleet"])
def plain(request: Any, releases: Releases) -> Iterator[Served]:
    flags = ["--replicas", "2"] if request.param == "fleet" else ["--staging", request.param]
    yield from serving(releases, *flags)


def test_a_head_that_is_broadcast_with_its_policy_changes_with_it(
    drafting: Served, releases: Releases
) -> None:
    sender, (old, new) = drafting.sender, releases.weights
    sender.init()
    policy = releases.part(new, head=False)
    for sent, head in ((policy, old), (new, new)):
        sender.post("start_weight_update", {})
        drafting.send(sent)
        reply = sender.post("finish_weight_update", {})
        assert reply.status_code == 200, reply.text
        assert drafting.live(new, head)
    short = dict(new)
    short.pop(max(releases.part(new, head=True)))
    sender.post("start_weight_update", {})
    sender.update(short.items())
    reply = sender.post("finish_weight_update", {})
    assert "mtp:model.layers.2" in reply.text
    assert drafting.live(new, new)


def test_without_a_start_a_head_behind_the_policy_is_an_update_of_its_own(
    drafting: Served, releases: Releases
) -> None:
    """Twice, as a trainer's steps are."""
    sender = drafting.sender
    sender.init()
    for weights in releases.weights:
        before = drafting.version
        policy, head = (releases.part(weights, head=which) for which in (False, True))
        sender.post("pause_generation", {"mode": "in_place"})
        drafting.send(policy)
        assert drafting.version == before + 1
        assert drafting.rollout.check_weights({"policy": policy}).equal
        names = list(head)
        drafting.send({name: head[name] for name in names[:3]})
        assert drafting.version == before + 1
        status, text = drafting.goes_on()
        assert (status, "make no whole model: mtp:model.layers.2" in text) == (422, True)
        assert "model.embed_tokens" not in text
        drafting.send({name: head[name] for name in names[3:]})
        assert drafting.version == before + 2
        receipt = drafting.rollout.receipts()[-1]
        assert set(receipt.components) == {"mtp"}
        assert drafting.live(weights, weights)
        assert drafting.goes_on()[0] == 200
        assert drafting.sender.post("finish_weight_update").json()["version"] == before + 2


def test_without_a_start_a_head_that_begins_before_the_policy_ends_goes_live_with_it(
    drafting: Served, releases: Releases
) -> None:
    sender, (old, new) = drafting.sender, releases.weights
    sender.init()
    for weights in (new, old):
        before = drafting.version
        policy, head = (list(releases.part(weights, head=which).items()) for which in (False, True))
        drafting.send(dict([*policy, head[0]]))
        assert drafting.version == before
        drafting.send(dict(head[1:]))
        assert drafting.version == before + 1
        assert drafting.live(weights, weights)
        drafting.send(dict(head))  # now first
        assert drafting.version == before + 1
        drafting.send(dict(policy))
        assert drafting.version == before + 2
        assert drafting.live(weights, weights)


def test_the_next_update_does_not_begin_in_a_head_that_is_not_whole(
    drafting: Served, releases: Releases
) -> None:
    sender, (old, new) = drafting.sender, releases.weights
    sender.init()
    drafting.send(new)
    policy, head = (releases.part(old, head=which) for which in (False, True))
    drafting.send(policy)
    before, last = drafting.version, max(head)
    drafting.send({name: t for name, t in head.items() if name != last})
    reply = sender.update(policy.items())
    assert reply.status_code == 422
    assert f"mtp:{last} is missing" in reply.text
    assert "start_weight_update" in reply.text
    assert (drafting.version, drafting.state) == (before, "idle")
    assert drafting.live(policy, new)
    sender.init()
    drafting.send(old)
    assert drafting.live(old, old)


@pytest.mark.parametrize("end", ["abort_weight_update", "finish_weight_update", "init"])
def test_a_part_of_a_late_head_goes_live_by_no_verb(
    drafting: Served, releases: Releases, end: str
) -> None:
    sender, (old, new) = drafting.sender, releases.weights
    sender.init()
    drafting.send(old)
    policy, head = (releases.part(new, head=which) for which in (False, True))
    drafting.send(policy)
    before = drafting.version
    drafting.send(dict(list(head.items())[:2]))
    if end == "init":
        sender.close()
        assert sender.init().status_code == 200
    else:
        reply = sender.post(end, {})
        assert reply.status_code == (200 if end.startswith("abort") else 422)
    eventually(lambda: drafting.state == "idle")
    assert drafting.version == before
    assert drafting.live(policy, old)
    sender.init()
    drafting.send(new)
    assert drafting.live(new, new)


def test_what_an_engine_passes_over_opens_no_update(plain: Served, releases: Releases) -> None:
    sender = plain.sender
    sender.init()
    for weights in releases.weights:
        before = plain.version
        policy, head = (releases.part(weights, head=which) for which in (False, True))
        sender.post("pause_generation", {"mode": "in_place"})
        plain.send(head)  # before the policy, too
        plain.send(policy)
        for name, tensor in head.items():
            plain.send({name: tensor})
        said = {"update_info": described([(name, tensor)])}
        with httpx.Client(base_url=plain.http.base_url, timeout=5.0) as other:  # its reply was lost
            assert other.post("/update_weights", json=said).status_code == 200
        assert (plain.version, plain.state) == (before + 1, "idle")
        assert plain.goes_on()[0] == 200
        assert plain.live(policy, {})


def test_a_broadcast_that_is_passed_over_and_does_not_come_can_be_ended(
    plain: Served, releases: Releases
) -> None:
    sender, (_, new) = plain.sender, releases.weights
    sender.init()
    policy, head = (releases.part(new, head=which) for which in (False, True))
    plain.send(policy)
    before = plain.version
    waits = sender.later(sender.post, "update_weights", {"update_info": described(head.items())})
    aborted = {"message": "Weight update aborted"}
    eventually(lambda: sender.post("abort_weight_update", {}).json() == aborted)
    assert waits.result(10.0).status_code >= 400
    assert (plain.version, plain.state) == (before, "idle")
    sender.init()
    plain.send(policy)
    assert plain.version == before + 1


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_tied_head_may_come_with_a_late_one(tied: Releases, replicas: int) -> None:
    for drafting in serving(tied, *DRAFTS, "--replicas", str(replicas)):
        sender, (old, new) = drafting.sender, tied.weights
        sender.init()
        policy, head = (tied.part(new, head=which) for which in (False, True))
        assert "lm_head.weight" not in policy
        same = {"lm_head.weight": new["model.embed_tokens.weight"]}
        first, *rest = ({name: tensor} for name, tensor in head.items())
        for parts in ([{**head, **same}], [first, same, *rest], [same, head], [head, same]):
            before = drafting.version
            drafting.send(policy)
            for part in parts:
                drafting.send(part)
            assert (drafting.version, drafting.state) == (before + 2, "idle")
            assert drafting.live(new, new)
        drafting.send(tied.part(old, head=False))
        drafting.send({n: t for n, t in tied.part(old, head=True).items() if n != "mtp.fc.weight"})
        reply = sender.update({**same, "mtp.fc.weight": old["mtp.fc.weight"]}.items())
        assert reply.status_code == 422
        assert "lm_head.weight: differs from model.embed_tokens.weight" in reply.text
        assert drafting.version == before + 3
        assert drafting.live(old, new)


def test_all_that_has_to_come_is_waited_for(releases: Releases) -> None:
    for drafting in serving(releases, *DRAFTS):
        sender, (_, new) = drafting.sender, releases.weights
        sender.init()
        policy, head = (releases.part(new, head=which) for which in (False, True))
        for starts in (False, True):
            drafting.rollout.sleep(2)
            drafting.rollout.wake_up()
            before = drafting.version
            if starts:
                assert sender.post("start_weight_update", {}).status_code == 200
            drafting.send(policy)
            assert drafting.version == before
            drafting.send(head)
            if starts:
                assert sender.post("finish_weight_update", {}).status_code == 200
                sender.init()
            assert drafting.version == before + 1
            assert drafting.live(new, new)
