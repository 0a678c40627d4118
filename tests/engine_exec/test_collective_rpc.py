"""Methods of a user's class, run on every rank by ``collective_rpc``."""

from pathlib import Path

import httpx
import pytest

from rollout import (
    AsyncRollout,
    ConfigError,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Rollout,
    SamplingParams,
)
from rollout.server.auth import Tokens
from rollout.server.http.app import build_app

FILE = Path(__file__).with_name("norms.py")
OWN = {"worker_extension_cls": f"{FILE}:Norms", "device": "cpu", "dtype": "float32"}
NORM = "model.norm.weight"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def two(tiny):
    with Rollout(str(tiny[0]), tensor_parallel_size=2, **OWN) as rollout:
        yield rollout


def test_every_rank_answers_in_the_order_of_the_ranks(two):
    told = two.collective_rpc("echo", args=[1, (None, "x")], kwargs={"b": 2.5})
    assert told == [[rank, 2, "cpu", [1, [None, "x"]], {"b": 2.5}] for rank in (0, 1)]


def test_a_method_reads_what_is_live(two, tiny):
    weights = dict(tiny[1].state_dict())
    for factor in (3, 1):
        two.update_weights([(NORM, weights[NORM] * factor)], partial=True)
        want = (weights[NORM] * factor).double().sum().item()
        assert two.collective_rpc("norm", args=[NORM]) == [want] * 2


def test_mistakes_are_named_and_the_engine_goes_on(two):
    before = two.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
    with pytest.raises(
        InvalidRequest, match=r"no method 'nope' .* echo, environment, fail_on, norm,"
    ):
        two.collective_rpc("nope")
    for name in ("_hidden", "bind", "model", "__init__"):
        with pytest.raises(InvalidRequest, match=f"no method '{name}'"):
            two.collective_rpc(name)
    with pytest.raises(EngineError, match=r"fail_on .* on rank 1 raised KeyError: .*that name"):
        two.collective_rpc("fail_on", args=[1])
    with pytest.raises(EngineError, match=r"vanish .* on rank 0 raised SystemExit: 3"):
        two.collective_rpc("vanish")
    with pytest.raises(EngineError, match=r"returned what JSON does not hold: .*Tensor"):
        two.collective_rpc("tensor")
    with pytest.raises(InvalidRequest, match=r"arguments must be what JSON holds: .*object"):
        two.collective_rpc("echo", args=[object()])
    with pytest.raises(InvalidRequest, match="takes a method's name, got function"):
        two.collective_rpc(lambda rank: rank)
    with pytest.raises(DeadlineExceeded, match=r"rank 0, 1 did not answer .*phase: sleep"):
        two.collective_rpc("sleep", args=[2], timeout=0.5)
    assert two.collective_rpc("fail_on", args=[2]) == [0, 1]
    assert two.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids == before


def test_a_client_is_told_whom_to_ask(two):
    with (
        Rollout.connect(two.address) as client,
        pytest.raises(ConfigError, match=r"Rollout that owns the engine.* POST /collective_rpc"),
    ):
        client.collective_rpc("echo")


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("norms.py", "is FILE.py:Class or module:Class, got 'norms.py'"),
        ("/nowhere/norms.py:Norms", "cannot be imported: FileNotFoundError"),
        (f"{FILE}:Nobody", "has no class Nobody"),
        (f"{FILE}:torch", "has no class torch"),
        ("pathlib:PosixPath.x", "is FILE.py:Class"),
        (f"{FILE}:TakesRank", "TakesRank has model, rank of its own"),
        (f"{FILE}:TakesMore", r"TakesMore\(\) raised TypeError: .*'more'"),
    ],
)
def test_what_is_no_class_fails_the_start(tiny, where, words):
    with pytest.raises(ConfigError, match=words):
        Rollout(str(tiny[0]), **{**OWN, "worker_extension_cls": where})


async def test_over_http_it_is_the_servers_own_class_or_nothing(tiny):
    async def asked(rollout, method, **body):
        app = build_app(rollout, tokens=Tokens(control="c"))
        transport = httpx.ASGITransport(app)
        headers = {"Authorization": "Bearer c"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://h", headers=headers
        ) as http:
            found = await http.post("/collective_rpc", json={"method": method, **body})
            info = (await http.get("/server_info")).json()["vllm_config"]["parallel_config"]
            unknown = await http.post("/collective_rpc", json=body | {"method": method}, headers={
                "Authorization": "Bearer other"
            })  # fmt: skip
        assert unknown.status_code == 401
        return found.status_code, found.json(), info

    dotted = {**OWN, "worker_extension_cls": "engine_exec.norms.Norms"}
    async with AsyncRollout(str(tiny[0]), **dotted, max_parallel_loading_workers=1) as rollout:
        status, found, info = await asked(rollout, "echo", args=[1], kwargs={"b": 2})
        assert (status, found) == (200, {"results": [[0, 1, "cpu", [1], {"b": 2}]]})
        assert info["worker_extension_cls"] == dotted["worker_extension_cls"]
        assert (info["max_parallel_loading_workers"], info["placement_group"]) == (1, None)
        status, found, _ = await asked(rollout, "echo", timeout=-1)
        assert (status, "timeout must be" in found["error"]["message"]) == (400, True)
        with pytest.raises(
            DeadlineExceeded, match=r"rank 0 did not answer within 0.5 s \(phase: sl"
        ):
            await rollout.collective_rpc("sleep", args=[2], timeout=0.5)  # a rank of this process
        with pytest.raises(EngineError, match=r"vanish .* raised SystemExit: 3"):
            await rollout.collective_rpc("vanish")
        status, found, _ = await asked(rollout, "reset_prefix_cache")
        assert (status, found) == (200, {"results": [None]})
    async with AsyncRollout(str(tiny[0]), device="cpu") as rollout:
        status, found, info = await asked(rollout, "echo")
        assert (status, "--worker-extension-cls" in found["error"]["message"]) == (400, True)
        assert info["worker_extension_cls"] == ""
        with pytest.raises(InvalidRequest, match="class that has it by worker_extension_cls"):
            await rollout.collective_rpc("echo")
