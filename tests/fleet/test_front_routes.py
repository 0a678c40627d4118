"""Weight routes of vLLM's and SGLang's trainers at a fleet's front: the fleet's transaction."""

import asyncio
import base64
from pathlib import Path

import httpx
import pytest
from adapted_models import adapted
from fleet_front import ENGINE, LEASE
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save, save_file

from rollout import AsyncRollout, Rollout
from rollout.errors import ConfigError
from rollout.fleet.calls.calls import Calls
from rollout.fleet.coordination.record import Record
from rollout.fleet.fleet import Fleet
from rollout.fleet.fronts.backend import FleetBackend
from rollout.fleet.fronts.routed_fleet import RoutedFleet
from rollout.fleet.fronts.routing_front import RoutingFront
from rollout.rpc.client import RolloutClient
from rollout.server.http.app import build_app

PROMPT = {"prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0}


def asked(engines, tmp_path, ask, **options):
    """What ``ask(http, fleet)`` gives, with a client of a front over these engines."""

    async def course():
        fleet = Fleet(Record(tmp_path / "record", LEASE), lease=LEASE)
        for engine in engines:
            fleet.add(engine.address)
        rollout = AsyncRollout.over(FleetBackend(fleet, **options))
        try:
            await rollout.start()
            transport = httpx.ASGITransport(build_app(rollout))
            async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
                http.rollout = rollout
                return await ask(http, fleet)
        finally:
            await rollout.shutdown()

    return asyncio.run(course())


@pytest.fixture
def weights(trained):
    return {name: t.clone().contiguous() for name, t in trained.state_dict().items()}


def test_a_directory_and_safetensors_in_a_body_update_the_whole_fleet(
    engines, tmp_path, weights, oracle
):
    step = tmp_path / "allowed" / "step"
    step.mkdir(parents=True)
    save_file(weights, step / "model.safetensors")
    (step / "STABLE").touch()
    text = base64.b64encode(save(weights)).decode()
    tensors = {"serialized_named_tensors": [text], "load_format": "safetensors"}

    async def ask(http, fleet):
        for path, body in (
            ("/update_weights_from_disk", {"model_path": str(step), "weight_version": "s1"}),
            ("/update_weights", {"weight_dir": str(step)}),  # prime-rl's
            ("/update_weights_from_tensor", tensors),
        ):
            for _ in range(2):  # who asks again gets the same
                reply = await http.post(path, json=body)
                assert reply.status_code == 200, reply.text
            assert [engine.weight_version for engine in engines] == [fleet.version] * 3
        labels = (await http.get("/get_weight_version")).json()
        sums = (await http.post("/weights_checker", json={})).json()
        answer = await http.post("/v1/completions", json=PROMPT | {"return_token_ids": True})
        outside = await http.post("/update_weights_from_disk", json={"model_path": "/etc"})
        assert "--weight-dir" in outside.json()["message"]
        return fleet.version, labels, len(sums["ranks"][0]["checksums"]), answer.json()

    version, labels, count, answer = asked(
        engines, tmp_path, ask, weight_dirs=[str(tmp_path / "allowed")]
    )
    assert (version, labels) == (3, {"weight_version": "3"})
    assert count == len(engines[0].weight_info().tensors)
    [expected] = oracle.generate([[5, 6, 7]], {"max_tokens": 5, "temperature": 0.0})
    assert answer["choices"][0]["token_ids"] == expected.outputs[0].token_ids


def test_a_directory_that_is_live_is_not_read_again_by_another_front_or_after_a_restart(
    engines, tmp_path, weights
):
    step = tmp_path / "step"
    step.mkdir()
    save_file(weights, step / "model.safetensors")
    (step / "STABLE").touch()
    bodies = {
        "/update_weights_from_disk": {"model_path": str(step), "weight_version": "s1"},
        "/update_weights": {"weight_dir": str(step)},  # prime-rl's
    }

    async def update(http, path):
        reply = await http.post(path, json=bodies[path])
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def first(http, fleet):
        address = await http.rollout.serve()
        other = RoutingFront(
            RoutedFleet(RolloutClient(address, keeps_epoch=False)), weight_dirs=[str(tmp_path)]
        )
        rollout = AsyncRollout.over(other)
        transport = httpx.ASGITransport(build_app(rollout))
        async with rollout, httpx.AsyncClient(transport=transport, base_url="http://x") as beside:
            for version, path in enumerate(bodies, 1):
                said = await update(http, path)
                assert await update(beside, path) == said
                assert fleet.version == version
        return said

    async def again(http, fleet):
        said = await update(http, "/update_weights")
        assert fleet.version == 2
        await update(http, "/update_weights_from_disk")
        assert fleet.version == 3  # it was no longer live
        return said

    options = {"weight_dirs": [str(tmp_path)]}
    assert asked(engines, tmp_path, first, **options) == asked(engines, tmp_path, again, **options)


def test_an_abort_is_answered_by_every_dialect_while_no_member_serves(
    engines, tmp_path, monkeypatch
):
    said = {"prompt": "hello", "max_tokens": 4, "request_id": "R1"}
    chat = {"messages": [{"role": "user", "content": "hello"}], "request_id": "R1"}

    async def ask(http, fleet):
        monkeypatch.setattr(fleet, "serving", list)
        monkeypatch.setattr(fleet, "standings", dict)
        monkeypatch.setattr(Calls, "_patience", float("inf"))
        found, abort = [], {"request_ids": ["R1"]}
        for path, body in (
            ("/generate", {"text": "hello", "rid": "R1"}),
            ("/v1/completions", said),
            ("/v1/chat/completions", chat),
        ):
            reply = asyncio.create_task(http.post(path, json=body))
            while (await http.post("/abort_requests", json=abort)).json() != {"aborted": 1}:
                await asyncio.sleep(0.05)
            found.append(await reply)
        return found

    replies = asked(engines, tmp_path, ask)
    assert [reply.status_code for reply in replies] == [200] * 3
    sglang, *openai = [reply.json() for reply in replies]
    assert (sglang["text"], sglang["meta_info"]["finish_reason"]["type"]) == ("", "abort")
    assert [one["choices"][0]["finish_reason"] for one in openai] == ["abort"] * 2


def test_sglangs_memory_routes_put_the_fleet_to_sleep_and_wake_it(engines, tmp_path):
    async def ask(http, fleet):
        assert (await http.post("/release_memory_occupation", json={})).status_code == 200
        asleep = await http.post("/v1/completions", json=PROMPT)
        for tag in ("weights", "kv_cache"):
            body = {"tags": [tag]}
            assert (await http.post("/resume_memory_occupation", json=body)).status_code == 200
        for path in ("/pause_generation", "/continue_generation"):
            assert (await http.post(path, json={})).status_code == 200, path
        return asleep.status_code, (await http.post("/v1/completions", json=PROMPT)).status_code

    assert asked(engines, tmp_path, ask) == (503, 200)


def test_a_group_of_a_trainer_and_ranks_is_refused_with_what_to_use(front, trained):
    front.fleet.wait_serving(3, 30.0)
    for transport in ("broadcast", "p2p"):
        with pytest.raises(
            ConfigError, match="a fleet's members come and go; use transport='auto'"
        ):
            front.rollout.update_weights(trained, transport=transport)
    receipt = front.rollout.update_weights(trained)
    assert receipt.transport in ("ipc", "inline")
    assert set(receipt.details["members"].values()) == {"committed"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_vllms_adapter_routes_load_and_name_one_of_every_member(checkpoint, tmp_path):
    where = tmp_path / "allowed" / "math"
    adapted(Path(checkpoint), 1).save_pretrained(where)
    body = PROMPT | {"ignore_eos": True, "return_token_ids": True}

    async def ask(http, fleet):
        async def posted(path, **body):
            reply = await http.post(path, json=body)
            return reply.status_code, reply.json()

        async def tokens(model):
            status, answer = await posted("/v1/completions", **body, model=model)
            assert (status, answer["model"]) == (200, model)
            return answer["choices"][0]["token_ids"]

        load = {"lora_name": "math", "lora_path": str(where)}
        base = (await http.get("/v1/models")).json()["data"][0]["id"]
        plain = await tokens(base)
        assert (await posted("/v1/load_lora_adapter", **load))[0] == 200
        assert fleet.version == 1
        names = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
        assert names == [base, "math"]
        assert await tokens("math") == await tokens(f"{base}:math") != plain
        assert await tokens(base) == plain
        metrics = (await http.get("/metrics")).text
        assert f'rollout_adapter_version{{adapter="math",model_name="{base}"}} 1.0' in metrics
        status, answer = await posted("/v1/load_lora_adapter", **load | {"lora_name": base})
        assert (status, "the base model's name" in str(answer)) == (400, True)
        status, answer = await posted("/v1/load_lora_adapter", lora_name="x", lora_path="/etc")
        assert (status, "--weight-dir" in str(answer)) == (400, True)
        assert (await posted("/v1/unload_lora_adapter", lora_name="math"))[0] == 200
        assert (await posted("/v1/unload_lora_adapter", lora_name="math"))[0] == 404
        assert (await posted("/v1/completions", **body, model="math"))[0] == 404

    started = [Rollout(checkpoint, **ENGINE, max_adapters=2, max_lora_rank=4) for _ in range(2)]
    try:
        asked(started, tmp_path, ask, weight_dirs=[str(tmp_path / "allowed")])
        assert [engine.weight_version for engine in started] == [2, 2]
    finally:
        for engine in started:
            engine.shutdown()


def test_a_mistyped_field_of_a_member_is_told_the_one_that_was_meant(engines, tmp_path):
    async def ask(http, fleet):
        return await http.post("/fleet/members", json={"adress": "127.0.0.1:1"})

    reply = asked(engines[:1], tmp_path, ask)
    assert reply.status_code == 400
    assert "adress: no such field; did you mean 'address'?" in reply.text


def figures(text):
    """Of each name, the values by the label that is not the model's."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = next((v for k, v in sample.labels.items() if k != "model_name"), "")
            found.setdefault(sample.name, {})[label] = sample.value
    return found


def test_metrics_have_the_members_also_when_none_serves(engines, tmp_path):
    async def scraped(http, serving, lost):
        for _ in range(600):
            found = figures((await http.get("/metrics")).text)
            counted = found.get("rollout_fleet_members_lost_total", {"": lost})
            if found["rollout_fleet_members"]["serving"] == serving and counted == {"": lost}:
                return found
            await asyncio.sleep(0.05)
        raise AssertionError(found)

    async def ask(http, fleet):
        found = [await scraped(http, 2, 0)]
        for ended, engine in enumerate(engines[:2], 1):
            engine.shutdown()
            found.append(await scraped(http, 2 - ended, ended))
        return found, [link.name for link in fleet.links()]

    (all_serve, one_serves, none), (first, second) = asked(engines[:2], tmp_path, ask)
    each = [found["rollout_fleet_member_serving"] for found in (all_serve, one_serves, none)]
    assert each == [{first: 1, second: 1}, {first: 0, second: 1}, {first: 0, second: 0}]
    assert all_serve["rollout_fleet_member_weight_version"] == {first: 0, second: 0}
    assert all_serve["rollout_fleet_member_running_requests"] == {first: 0, second: 0}
    assert all_serve["rollout_fleet_members"] == {
        "joining": 0, "serving": 2, "fenced": 0, "leaving": 0, "left": 0
    }  # fmt: skip
    assert none["rollout_fleet_members"]["fenced"] == 2
    assert "rollout_fleet_members_lost_total" in one_serves
    assert "rollout_running_requests" not in none


def test_a_session_has_one_member_for_each_front_by_whatever_name_a_client_gives_it(
    engines, tmp_path
):
    """A front that takes over knows nothing of what was asked before."""
    body = {"max_tokens": 1, "temperature": 0}
    ways = [
        ("/v1/completions", {"prompt": [5, 6], **body}, {"X-Session-ID": "s0"}),
        ("/v1/completions", {"prompt": [6, 7], **body}, {"X-SMG-Routing-Key": "s0"}),
        ("/v1/completions", {"prompt": [7, 8], "session_id": "s0", **body}, {}),
        ("/v1/completions", {"prompt": [8, 9], "prompt_cache_key": "s0", **body}, {}),
        ("/generate", {"input_ids": [9, 4], "sampling_params": {"max_new_tokens": 1}},
            {"X-SMG-Routing-Key": "s0"}),
    ]  # fmt: skip

    async def ask(http, fleet):
        """Which engines have had a prompt of each of these."""
        await asyncio.to_thread(fleet.wait_serving, 3, 30.0)
        found = []
        for path, asked, headers in ways:
            before = [engine.metrics().prompt_tokens_total for engine in engines]
            answer = await http.post(path, json=asked, headers=headers)
            assert answer.status_code == 200, answer.text
            after = [engine.metrics().prompt_tokens_total for engine in engines]
            found += [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if b > a]
        return found

    homes = [asked(engines, tmp_path / front, ask) for front in ("first", "second")]
    assert len(homes[0]) == len(homes[1]) == len(ways)
    assert len({*homes[0], *homes[1]}) == 1
