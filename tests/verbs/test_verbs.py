"""vLLM's verbs over HTTP and gRPC, with a plain torch sender, at one and two ranks."""

from __future__ import annotations

import asyncio
import json
import time

import grpc
import httpx
import pytest
import torch
import torch.distributed as dist
from sender import Sender, described
from serving import descendants
from shared_engines import eventually

from rollout import AsyncRollout
from rollout.errors import ConfigError, UpdateInProgress
from rollout.fleet.fronts.routed_fleet import RoutedFleet
from rollout.fleet.fronts.routing_front import RoutingFront
from rollout.rpc.client import RolloutClient
from rollout.rpc.rollout_pb2 import WeightDocument
from rollout.rpc.services import WeightSyncStub
from rollout.rpc.status import error_from_rpc
from rollout.server.http.app import build_app


def error_of(reply) -> tuple[int, str, str]:
    error = reply.json()["error"]
    return reply.status_code, error["type"], error["message"]


def same(engine, weights) -> bool:
    return engine.rollout.check_weights(dict(weights)).equal


def test_an_update_is_one_version_and_is_what_was_sent(engine, sender, weights) -> None:
    assert sender.init().json()["message"] == "Weight transfer initialized"
    before = engine.info()["version"]
    for seed, label, said in ((1, "step-1", "step-1"), (2, 7, "7"), (1, None, None)):
        started = sender.post("start_weight_update", {})
        assert started.json()["version"] == before + 1
        assert sender.update(weights[seed].items()).status_code == 200
        assert sender.sent is None
        assert engine.info()["version"] == before  # nothing is live before the finish
        done = sender.post("finish_weight_update", label and {"weight_version": label}).json()
        before += 1
        assert done["version"] == engine.info()["version"] == before
        assert done["weight_version"] == engine.info()["weight_version"] == (said or str(before))
        assert done["receipt"]["transport"] == engine.transport
        assert "sender sent none" in done["receipt"]["details"]["digests"]
        assert done["receipt"]["num_tensors"] == len(weights[seed])
        assert same(engine, weights[seed])
        assert done["receipt"]["details"].get("members", {}).keys() == engine.members
        assert engine.rollout.receipts()[-1].digest == done["receipt"]["digest"]


@pytest.mark.parametrize("where", ["update", "init"])
def test_packed_tensors_arrive_whatever_the_size_of_a_pack(engine, weights, where) -> None:
    """vLLM up to 0.27 says so in the update, from 0.28 on in the init."""
    sender, extra = Sender(engine.http, engine.ranks, packed=True), {}
    size = {"packed": True, "packed_buffer_size_bytes": 20_000, "packed_num_buffers": 2}
    sender.init(**(size if where == "init" else {}))
    sender.post("start_weight_update", {"is_checkpoint_format": True})
    if where == "update":
        extra = size
    info = {"packed_buffer_size_bytes": 20_000}
    tensors = list(weights[2].items())
    body = {"update_info": {**described(tensors), **extra}}
    future = sender.later(sender.post, "update_weights", body)
    assert sender.broadcast([t for _, t in tensors], info) is None
    assert future.result(60).status_code == 200
    assert sender.post("finish_weight_update").status_code == 200
    assert same(engine, weights[2])


def test_an_update_may_come_in_parts_and_in_another_dtype(engine, sender, weights) -> None:
    tensors = [(name, t.bfloat16()) for name, t in weights[1].items()]
    sender.joined()
    sender.post("start_weight_update")
    for part in (tensors[:3], tensors[3:4], tensors[4:]):
        assert sender.update(part).status_code == 200
    assert sender.post("finish_weight_update").status_code == 200
    assert same(engine, {name: t.float() for name, t in tensors})


def test_without_a_start_the_call_that_completes_the_model_commits(engine, sender, weights) -> None:
    sender.init()
    before = engine.info()["version"]
    tensors = list(weights[2].items())
    assert sender.update(tensors[:4]).status_code == 200
    assert engine.info()["version"] == before
    assert sender.update(tensors[4:]).status_code == 200
    assert engine.info()["version"] == before + 1
    assert same(engine, weights[2])
    assert sender.post("finish_weight_update").json()["version"] == before + 1  # says it again


def test_an_incomplete_update_does_not_go_on_through_any_front(engine, sender, weights) -> None:
    async def through_another_front() -> tuple[int, str]:
        client = RolloutClient(engine.served.grpc, keeps_epoch=False)
        rollout = AsyncRollout.over(RoutingFront(RoutedFleet(client), start_timeout=60.0))
        transport = httpx.ASGITransport(build_app(rollout))
        async with rollout, httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            reply = await http.post("/continue_generation", json={})
            return reply.status_code, reply.text

    sender.init()
    tensors = list(weights[2].items())
    sender.post("pause_generation", {"mode": "in_place"})
    assert sender.update(tensors[:-1]).status_code == 200
    reply = sender.post("continue_generation", {})
    said = [(reply.status_code, reply.text)]
    if engine.members:
        said.append(asyncio.run(through_another_front()))
    for status, text in said:
        assert status == 422
        assert tensors[-1][0] in text
        assert "still paused" in text
    assert engine.http.get("/is_paused").json() == {"is_paused": True}
    assert sender.update(tensors[-1:]).status_code == 200
    if engine.members:
        assert asyncio.run(through_another_front())[0] == 200
    assert sender.post("continue_generation", {}).status_code == 200


def test_aliases_that_come_after_the_commit_are_compared_with_it(engine, sender, weights) -> None:
    """A tied head in a bucket of its own, behind the one that completes the model."""
    sender.init()
    before = engine.info()["version"]
    head = [("lm_head.weight", weights[2]["model.embed_tokens.weight"])]
    assert sender.update(weights[2].items()).status_code == 200
    assert sender.update(head).status_code == 200
    info = engine.info()
    assert (info["version"], info["state"]) == (before + 1, "idle")
    assert same(engine, weights[2])
    assert sender.update(weights[1].items()).status_code == 200
    status, kind, message = error_of(sender.update(head))
    assert (status, kind) == (422, "WeightMismatch")
    assert "lm_head.weight: differs from model.embed_tokens.weight" in message
    assert engine.info()["version"] == before + 2
    assert same(engine, weights[1])


WRONG = {
    "a name": (lambda t: [("model.nonsense.weight", torch.ones(3))], "model.nonsense.weight"),
    "a shape": (lambda t: [("model.norm.weight", torch.ones(3))], "model.norm.weight has shape"),
    "twice": (lambda t: t[:1], "is sent 2 times"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_named_and_the_sender_is_freed(engine, sender, weights, what) -> None:
    make, words = WRONG[what]
    sender.joined()
    before, tokens = engine.info(), engine.tokens()
    sender.post("start_weight_update")
    begun = time.monotonic()
    reply = sender.update([*make(list(weights[1].items())), *weights[1].items()])
    status, kind, message = error_of(reply)
    assert (status, kind) == (422, "WeightMismatch")
    assert words in message
    assert sender.sent is not None  # its broadcast failed instead of waiting for ever
    assert time.monotonic() - begun < 25
    assert (engine.info(), engine.tokens()) == (before, tokens)
    for verb in ("update_weights", "finish_weight_update"):
        body = {"update_info": described(weights[1].items())} if verb[:6] == "update" else None
        assert words in sender.post(verb, body).json()["error"]["message"]


@pytest.mark.parametrize(("shape", "count"), [([1 << 47], 1), ([1 << 44], 1), ([1 << 28], 9)])
def test_what_is_no_weight_is_received_up_to_a_bound(engine, sender, shape, count) -> None:
    sender.joined()
    before = engine.info()
    sender.post("start_weight_update", {"timeout": 3})
    names = [f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(count)]
    info = {"names": names, "dtype_names": ["float32"] * count, "shapes": [shape] * count}
    info |= {"packed": True, "packed_buffer_size_bytes": 1 << 40}
    status, kind, message = error_of(sender.post("update_weights", {"update_info": info}))
    assert (status, kind) == (422, "WeightMismatch")
    assert names[0] in message
    assert f"{count * 4 * shape[0]} bytes in one broadcast" in message
    assert engine.info() == before


def test_a_finish_that_lacks_tensors_is_refused_and_names_them(engine, sender, weights) -> None:
    sender.joined()
    before, tokens = engine.info(), engine.tokens()
    sender.post("start_weight_update")
    sender.update(list(weights[1].items())[:-1])
    status, kind, message = error_of(sender.post("finish_weight_update"))
    assert (status, kind) in ((422, "WeightMismatch"), (422, "IncompleteUpdate"))
    assert list(weights[1])[-1] in message
    assert (engine.info(), engine.tokens()) == (before, tokens)
    sender.post("start_weight_update")  # the group is as it was: nothing was under way in it
    assert sender.update(weights[1].items()).status_code == 200
    assert sender.post("finish_weight_update").status_code == 200


def test_only_one_update_is_open_at_a_time(engine, sender, weights) -> None:
    sender.joined()
    assert sender.post("start_weight_update").status_code == 200
    assert error_of(sender.post("start_weight_update"))[:2] == (409, "UpdateInProgress")
    with pytest.raises(UpdateInProgress):
        engine.rollout.update_weights(dict(weights[1]), timeout=2)
    assert sender.post("abort_weight_update", {"reason": "enough"}).status_code == 200
    assert "enough" in error_of(sender.post("finish_weight_update"))[2]
    assert error_of(sender.post("finish_weight_update"))[:2] == (409, "VersionConflict")
    assert sender.post("abort_weight_update").json()["message"] == "Nothing to abort"
    engine.rollout.update_weights(dict(weights[1]))
    assert same(engine, weights[1])


@pytest.mark.more
@pytest.mark.parametrize("engine", [(1, 2)], indirect=True, ids=["fleet"])
def test_between_two_verbs_the_deadline_counts_and_not_the_timeout(engine, sender, weights) -> None:
    """As of an engine, which the other tests show: a trainer may have to gather."""
    sender.joined()
    tensors = list(weights[1].items())
    sender.post("start_weight_update", {"timeout": 4.0})
    assert sender.update(tensors[:4]).status_code == 200
    time.sleep(5.0)
    assert sender.update(tensors[4:]).status_code == 200
    assert sender.post("finish_weight_update").status_code == 200
    assert same(engine, weights[1])


def test_an_update_that_nobody_goes_on_with_ends_at_its_deadline(engine, sender, weights) -> None:
    sender.joined()
    before = engine.info()
    sender.post("start_weight_update", {"deadline": 2.5})
    sender.update(list(weights[1].items())[:2])  # moves the deadline
    assert engine.info()["state"] == "staging"
    eventually(lambda: engine.info()["state"] == "idle")
    assert engine.info() == before
    status, kind, message = error_of(sender.post("finish_weight_update"))
    assert (status, kind) == (409, "VersionConflict")
    assert "deadline of 2.5 s" in message
    assert sender.post("start_weight_update").status_code == 200


def test_a_broadcast_that_does_not_come_ends_the_update(engine, sender, weights) -> None:
    sender.joined()
    before = engine.info()
    sender.post("start_weight_update", {"timeout": 1})
    body = {"update_info": described(weights[1].items())}
    begun = time.monotonic()
    assert error_of(sender.post("update_weights", body))[:2] == (409, "DeadlineExceeded")
    assert time.monotonic() - begun < 25
    assert engine.info() == before
    assert error_of(sender.post("start_weight_update"))[0] == 400  # init first


def test_abort_ends_an_update_that_is_receiving(engine, sender, weights) -> None:
    sender.joined()
    before = engine.info()
    sender.post("start_weight_update")
    body = {"update_info": described(weights[1].items())}
    waiting = sender.later(sender.post, "update_weights", body)
    sender.arrived()
    other = {"update_info": described(list(weights[1].items())[:1])}
    assert error_of(sender.post("update_weights", other))[:2] == (409, "UpdateInProgress")
    assert sender.post("abort_weight_update").status_code == 200
    assert error_of(waiting.result(60))[1] == "TransferFailed"
    assert engine.info() == before


@pytest.mark.parametrize("how", ["longer", "gone"])
def test_a_sender_that_breaks_its_word_costs_the_update_alone(engine, sender, weights, how) -> None:
    """gloo ends the process that gets a longer message than it waits for."""
    sender.joined()
    before, tokens = engine.info(), engine.tokens()
    children = len(descendants(engine.served.process.pid))
    sender.post("start_weight_update", {"timeout": 20})
    body = {"update_info": described(weights[1].items())}
    waiting = sender.later(sender.post, "update_weights", body)
    if how == "longer":
        sender.broadcast([t.double() for t in weights[1].values()], {})
    else:
        sender.arrived()
        sender.close()
    begun = time.monotonic()
    status, kind, message = error_of(waiting.result(60))
    assert (status, kind) == (409, "TransferFailed"), message
    assert time.monotonic() - begun < 25
    assert (engine.info(), engine.tokens()) == (before, tokens)
    # The processes that held the places end, too.
    eventually(lambda: len(descendants(engine.served.process.pid)) == children - engine.ranks, 30)
    again = Sender(engine.http, engine.ranks)
    assert again.init().status_code == 200
    again.post("start_weight_update")
    assert again.update(weights[2].items()).status_code == 200
    assert again.post("finish_weight_update").status_code == 200
    assert same(engine, weights[2])


def test_a_group_that_cannot_form_is_refused_in_bounded_time(engine, sender) -> None:
    info = sender.init_info
    small = {"init_info": {**info, "rank_offset": 2}}
    status, kind, message = error_of(sender.post("init_weight_transfer_engine", small))
    assert (status, kind) == (400, "ConfigError")
    assert f"this engine's {engine.ranks} ranks" in message
    begun = time.monotonic()
    body = {"init_info": info, "timeout": 1}
    status, _, message = error_of(sender.post("init_weight_transfer_engine", body))
    assert status == 409
    assert f"127.0.0.1:{info['master_port']}" in message
    assert time.monotonic() - begun < 25
    assert engine.info()["state"] == "idle"


@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_an_init_whose_trainer_never_comes_can_be_ended(engine, weights, how) -> None:
    sender = Sender(engine.http, engine.ranks)
    address, begun = f"127.0.0.1:{sender.port}", time.monotonic()
    store = dist.TCPStore("127.0.0.1", sender.port, is_master=True, wait_for_workers=False)
    if how == "abort":
        init = ("init_weight_transfer_engine", {"init_info": sender.init_info, "timeout": 300})
        end, told = ("abort_weight_update", {"reason": "it died"}), "abort_weight_update: it died"
    else:
        group = {"group_name": "g"}
        init = ("init_weights_update_group", {**sender.init_info, **group, "backend": "gloo"})
        end, told = ("destroy_weights_update_group", group), "by destroy_weights_update_group"
    waiting = sender.later(sender.post, *init)
    under_way = "is under way; wait for its answer, or end what waits for a trainer by abort"
    eventually(lambda: under_way in sender.post("finish_weight_update", {"update_id": "u"}).text)
    if engine.replicas == 1:  # a front's places hold up no other update
        eventually(lambda: engine.info()["state"] == "staging")
        with pytest.raises(UpdateInProgress, match=f"an init that waits .* at {address} .*abort_w"):
            engine.rollout.update_weights(dict(weights[1]), timeout=2)
    ended = sender.post(*end)
    assert ended.status_code == 200, ended.text
    reply = waiting.result(10)
    assert reply.status_code == (409 if how == "abort" else 400)  # SGLang has that for all
    assert f"waited for its trainer at {address} was" in reply.text
    assert told in reply.text
    assert engine.info()["state"] == "idle"
    assert sender.post("abort_weight_update").json()["message"] == "Nothing to abort"
    assert time.monotonic() - begun < 50  # both inits have longer
    del store
    again = Sender(engine.http, engine.ranks)
    assert again.init().status_code == 200
    again.post("start_weight_update")
    assert again.update(weights[2].items()).status_code == 200
    assert again.post("finish_weight_update").status_code == 200


BAD = [
    ("init_weight_transfer_engine", {}, "init_info"),
    ("init_weight_transfer_engine", {"init_info": {"master_address": "a b"}}, "master_address"),
    ("init_weight_transfer_engine", {"init_info": {"local_checkpoint_dir": "d"}}, "deltas"),
    ("start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
    ("start_weight_update", {"dead_line": 1}, "dead_line"),
    ("update_weights", {"update_info": {"names": ["a"]}}, "shapes"),
    ("finish_weight_update", {"weight_version": [1]}, "weight_version"),
]


@pytest.mark.parametrize(("verb", "body", "words"), BAD)
def test_a_malformed_body_is_named_through_either_door(engine, verb, body, words) -> None:
    assert words in error_of(engine.http.post(f"/{verb}", json=body))[2]
    rpc = "".join(word.capitalize() for word in verb.split("_"))
    with grpc.insecure_channel(engine.served.grpc) as channel:
        call = getattr(WeightSyncStub(channel), rpc)
        with pytest.raises(grpc.RpcError) as caught:
            call(WeightDocument(json=json.dumps(body).encode()), timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in str(error_from_rpc(caught.value, "here"))


def test_the_verbs_over_grpc_are_the_same_session(engine, sender, weights) -> None:
    with grpc.insecure_channel(engine.served.grpc) as channel:
        stub = WeightSyncStub(channel)

        def call(rpc: str, body: dict) -> dict:
            data = WeightDocument(json=json.dumps(body).encode())
            return json.loads(getattr(stub, rpc)(data, timeout=60).json)

        joining = sender.later(call, "InitWeightTransferEngine", {"init_info": sender.init_info})
        sender.join()
        assert joining.result(60)["world_size"] == engine.ranks + 1
        before = call("StartWeightUpdate", {})["version"] - 1
        assert error_of(sender.post("start_weight_update"))[0] == 409
        body = {"update_info": described(weights[1].items())}
        receiving = sender.later(call, "UpdateWeights", body)
        assert sender.broadcast(list(weights[1].values()), {}) is None
        assert receiving.result(60)["num_tensors"] == len(weights[1])
        assert call("FinishWeightUpdate", {"weight_version": "x"})["version"] == before + 1
        assert call("AbortWeightUpdate", {}) == {"message": "Nothing to abort"}
    assert engine.info()["weight_version"] == "x"
    assert same(engine, weights[1])


def test_a_trainer_learns_what_it_asks_for(engine) -> None:
    config = engine.http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "gloo"}
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["model_config"]["logprobs_mode"] == "raw_logprobs"
    parallel = config["parallel_config"]
    assert parallel["tensor_parallel_size"] == parallel["world_size"] == engine.ranks
    assert parallel["pipeline_parallel_size"] == parallel["data_parallel_size"] == 1
    assert parallel["disable_custom_all_reduce"] is True
    unset = ("max_parallel_loading_workers", "tokenizer_pool_config", "placement_group")
    assert [parallel[name] for name in unset] == [None] * 3
    assert engine.http.get("/get_world_size").json() == {"world_size": engine.ranks}
    assert engine.rollout.server_info().world_size == engine.ranks


def test_the_session_error_of_an_engine_elsewhere_is_named(engine) -> None:
    """A gateway over a connected ``AsyncRollout`` has no ranks of its own."""
    from rollout import AsyncRollout
    from rollout.server.verbs import StartBody, Verbs

    async def ask() -> None:
        gateway = AsyncRollout.connect(engine.served.grpc)
        with pytest.raises(ConfigError, match="own server"):
            await Verbs(gateway).start(StartBody())

    import asyncio

    asyncio.run(ask())
