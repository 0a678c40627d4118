"""Adapters behind a fleet's front: one commit, one version of a name on every member."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from adapted_models import adapted, shaken
from fleet_front import ENGINE, Front, break_off

from rollout import Rollout, SamplingParams
from rollout.errors import ConfigError, InvalidRequest, VersionConflict, WeightMismatch
from rollout.weight_sync.protocol.messages import UpdateRequest

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
    pytest.mark.usefixtures("forked_ranks"),
]

# The same bits wherever a request goes on, so that its tokens are the same.
SETTINGS = {**ENGINE, "max_adapters": 4, "max_lora_rank": 8, "deterministic": True}
GREEDY = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
PROMPTS = [[5, 6, 7, n] for n in range(9)]


@pytest.fixture(scope="module")
def engines(checkpoint):
    started = [Rollout(checkpoint, **SETTINGS) for _ in range(3)]
    yield started
    for engine in started:
        engine.shutdown()


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return tmp_path_factory.mktemp("record")


@pytest.fixture(scope="module")
def shared(engines, record):
    front = Front(record, engines)
    yield front
    front.close()


@pytest.fixture
def front(shared):
    """All its members serve, and no adapter is there."""
    shared.fleet.wait_serving(3, 20.0)
    for name in shared.rollout.weight_info().adapters:
        shared.rollout.unload_lora_adapter(name)
    return shared


@pytest.fixture(scope="module")
def _no_thread_is_left(shared):
    """They are the module's."""


@pytest.fixture(scope="module")
def model(checkpoint):
    return adapted(Path(checkpoint), 1)


@pytest.fixture(scope="module")
def alone(checkpoint):
    """An engine by itself, to compare with."""
    with Rollout(checkpoint, **SETTINGS) as engine:
        yield engine


def said(rollout, adapter=None, **more):
    outputs = rollout.generate(PROMPTS, SamplingParams(adapter=adapter, **GREEDY, **more))
    assert {o.outputs[0].adapter.partition("@")[0] for o in outputs} == {adapter or ""}
    return [output.outputs[0].token_ids for output in outputs]


def eventually(true, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def serves_again(front, engine):
    """It has its grant, too, so that it may be asked directly."""
    front.fleet.wait_serving(3, 20.0)
    eventually(lambda: engine.metrics().state == "running")


def adapters_of(engines):
    return [engine.weight_info().adapters for engine in engines]


def missing(front, engine, change):
    """What ``change`` gives, while an update of somebody else's keeps ``engine`` from it."""
    other = engine._async.backend.open()
    other.begin(UpdateRequest(update_id="other", bucket_bytes=1 << 16, timeout=5.0))
    try:
        return change()
    finally:
        other.close()


def test_adapters_are_one_commit_of_all_members(front, engines, model, alone, tmp_path):
    base = said(front.rollout)
    receipt = front.rollout.update_weights(model, adapters_only=True)
    version = receipt.version
    assert receipt.details["members"] == dict.fromkeys(front.names, "committed")
    assert receipt.adapters["default"].version == version == front.fleet.version
    assert adapters_of(engines) == [{"default": version}] * 3
    shaken(model, 2).save_pretrained(tmp_path)
    with Rollout.connect(front.rollout.address) as client:
        second = client.update_weights(adapters={"math": model, "code": tmp_path})
        assert second.version == client.weight_version == version + 1
        live = client.weight_info()
    assert live.adapters == {"default": version, "math": version + 1, "code": version + 1}
    assert live.max_adapters == 4
    assert adapters_of(engines) == [live.adapters] * 3
    assert len({engine.weight_info().adapter_digests["math"] for engine in engines}) == 1
    sent = alone.update_weights(adapters={"math": model})
    assert sent.adapters["math"].digest == second.adapters["math"].digest
    expected = said(alone, "math")
    assert said(front.rollout, "math") == said(front.rollout, "code") == expected
    assert said(front.rollout) == base != expected
    assert front.rollout.metrics().adapters == live.adapters
    [output] = front.rollout.generate([[5, 6]], SamplingParams(adapter="math", **GREEDY))
    assert output.outputs[0].adapter == f"math@{version + 1}"
    with pytest.raises(InvalidRequest, match="no adapter 'other'"):
        said(front.rollout, "other")
    used = [engine.metrics().prompt_tokens_total for engine in engines]
    assert all(used), "requests with adapters are spread over all members"


def test_a_request_waits_for_the_commit_that_brings_its_adapter(front, model):
    wanted = front.fleet.version + 1
    front.rollout.update_weights(adapters={"math": shaken(model, 3)})
    assert said(front.rollout, "math", min_version=wanted)


def test_what_one_member_refuses_changes_none(front, engines, checkpoint, model):
    front.rollout.update_weights(adapters={"math": shaken(model, 4)})
    before, held = said(front.rollout, "math"), adapters_of(engines)
    with pytest.raises(ConfigError, match="max_lora_rank=16"):
        front.rollout.update_weights(adapters={"math": adapted(Path(checkpoint), 5, r=16)})
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B" in n).fill_(float("nan"))
    with pytest.raises(WeightMismatch, match=r"lora_B"):
        front.rollout.update_weights(adapters={"math": model})
    shaken(model, 4)
    # One member alone has no slot left, once others are asked.
    for name in ("a", "b"):
        front.rollout.update_weights(adapters={name: model})
    with pytest.raises(ConfigError, match=r"members? .*no slot can become free"):
        front.rollout.update_weights(adapters={"c": model, "d": model})
    assert [found["math"] for found in adapters_of(engines)] == [f["math"] for f in held]
    assert len(front.fleet.serving()) == 3
    assert said(front.rollout, "math") == before


def test_verbs_load_and_unload_on_all_members(front, engines, model, alone, tmp_path):
    shaken(model, 6).save_pretrained(tmp_path)
    alone.load_lora_adapter("math", tmp_path)
    loaded = front.rollout.load_lora_adapter("math", tmp_path)
    assert (loaded.merged, loaded.version) == (False, front.fleet.version)
    assert front.rollout.load_lora_adapter("math", tmp_path) == loaded  # files look the same
    again = front.rollout.load_lora_adapter("math", tmp_path, inplace=True)
    assert again.version == loaded.version + 1
    assert adapters_of(engines) == [{"math": again.version}] * 3
    assert said(front.rollout, "math") == said(alone, "math")
    with pytest.raises(ConfigError, match=r"'math': .*fleet.* ask the fleet's own address"):
        engines[0].load_lora_adapter("math", tmp_path)
    with pytest.raises(ConfigError, match=r"'math': .*fleet.* ask the fleet's own address"):
        engines[0].unload_lora_adapter("math")
    assert front.rollout.unload_lora_adapter("math")
    assert not front.rollout.unload_lora_adapter("math")
    assert adapters_of(engines) == [{}] * 3
    assert [engine.weight_version for engine in engines] == [front.fleet.version] * 3
    with pytest.raises(InvalidRequest, match="no adapter 'math'"):
        said(front.rollout, "math")
    with pytest.raises(VersionConflict, match="not once an adapter has been unloaded"):
        front.rollout.rollback()
    front.rollout.load_lora_adapter("math", tmp_path)
    with Rollout.connect(front.rollout.address) as client:
        assert client.unload_lora_adapter("math")
        assert not client.unload_lora_adapter("math")
        assert client.weight_version == front.fleet.version == again.version + 3
    assert adapters_of(engines) == [{}] * 3
    with Rollout.connect(alone.address) as client:
        with pytest.raises(VersionConflict, match="adapter other@1 is not sent, and None is here"):
            client._async.backend.open().begin(
                UpdateRequest(
                    update_id="z", components=(), adapters_after={"other": 1},
                    bucket_bytes=1 << 16, timeout=5.0,
                )
            )  # fmt: skip
        assert client.unload_lora_adapter("math")
    assert alone.weight_info().adapters == {}
    assert alone.unload_lora_adapter("math") is False


def test_a_member_that_joins_gets_the_adapters_with_proof_before_it_serves(
    front, engines, model, trained, checkpoint
):
    both = front.rollout.update_weights(trained, adapters={"math": shaken(model, 7)})
    front.rollout.update_weights(adapters={"code": shaken(model, 8)})
    expected = said(front.rollout, "math"), said(front.rollout, "code")
    late = Rollout(checkpoint, **SETTINGS)
    try:
        late.update_weights(adapters={"own": shaken(model, 9)})  # what the fleet does not have
        name = front.fleet.add(late.address)
        front.fleet.wait_serving(4, 20.0)
        eventually(lambda: late.metrics().state == "running")
        info = late.weight_info()
        assert info.adapters == {"math": both.version, "code": both.version + 1}
        assert info.adapter_digests == engines[0].weight_info().adapter_digests
        assert info.version == front.fleet.version
        assert (said(late, "math"), said(late, "code")) == expected
        third = front.rollout.update_weights(adapters={"code": shaken(model, 10)})
        assert third.details["members"].get(name) == "committed"
        assert adapters_of([late]) == adapters_of(engines[:1])
    finally:
        front.fleet.remove(name)
        late.shutdown()


def test_a_member_joins_a_fleet_whose_adapters_change_without_a_pause(front, model, checkpoint):
    """No such update takes along who is behind, and each ends what others send it."""
    front.rollout.update_weights(adapters={"math": shaken(model, 7)})
    changed, over = shaken(model, 8), threading.Event()

    def change(name):
        while not over.is_set():
            front.rollout.update_weights(adapters={name: changed})

    late = Rollout(checkpoint, **SETTINGS)
    with ThreadPoolExecutor(2) as pool:
        changing = [pool.submit(change, name) for name in ("math", "code")]
        name = front.fleet.add(late.address)
        try:
            front.fleet.wait_serving(4, 20.0)
        finally:
            over.set()
    for each in changing:
        each.result()
    front.fleet.remove(name)
    late.shutdown()


def test_no_member_serves_an_adapter_on_a_base_that_it_was_merged_into(
    front, engines, model, checkpoint
):
    front.rollout.update_weights(shaken(model, 30))
    late = Rollout(checkpoint, **SETTINGS)
    name = front.fleet.add(late.address)
    try:
        front.fleet.wait_serving(4, 20.0)
        for rollout in (front.rollout, late, *engines):
            assert rollout.weight_info().merged == ("default",)
        with pytest.raises(ConfigError, match=r"sent merged with default: .* would count twice"):
            front.rollout.update_weights(model, adapters_only=True)
        receipt = front.rollout.update_weights(model, adapters={"default": model})
        assert receipt.details["members"].get(name) == "committed"
        assert front.rollout.weight_info().merged == ()
    finally:
        front.fleet.remove(name)
        late.shutdown()


def test_a_member_that_cannot_hold_them_does_not_serve_and_says_why(front, model, checkpoint):
    front.rollout.update_weights(adapters={"math": shaken(model, 11)})
    with Rollout(checkpoint, **ENGINE, deterministic=True) as bare:
        name = front.fleet.add(bare.address)
        try:
            eventually(lambda: "max_adapters" in row(front, name)["why"])
            assert row(front, name)["status"] != "serving"
        finally:
            front.fleet.remove(name)


def row(front, name):
    return next(found for found in front.fleet.members() if found["name"] == name)


def test_a_rollback_brings_back_the_adapters_of_all_members(front, engines, model):
    first = front.rollout.update_weights(adapters={"math": shaken(model, 12)}).version
    base, before = said(front.rollout), said(front.rollout, "math")
    front.rollout.update_weights(adapters={"math": shaken(model, 13), "code": model})
    assert said(front.rollout, "math") != before
    receipt = missing(front, engines[1], lambda: front.rollout.rollback(timeout=1.0))
    members = receipt.details["members"]
    assert members.pop(front.names[1]).startswith("fenced")
    assert set(members.values()) == {"committed"}
    assert receipt.adapters["math"].version == first
    assert receipt.version == first + 2 == front.fleet.version
    # Who missed it has math of a later version, and gets the one before from another.
    serves_again(front, engines[1])
    assert adapters_of(engines) == [{"math": first}] * 3
    for rollout in (front.rollout, engines[1]):
        assert (said(rollout, "math"), said(rollout)) == (before, base)
    with pytest.raises(VersionConflict, match="no predecessor"):
        front.rollout.rollback()
    assert front.rollout.update_weights(adapters={"math": model}).version == first + 3
    assert adapters_of(engines) == [{"math": first + 3}] * 3


def test_a_member_that_misses_changes_of_adapters_catches_up(front, engines, model):
    """It has to give up what it will not need first: its slots would not suffice."""
    names = ("a", "b", "c")
    front.rollout.update_weights(adapters=dict.fromkeys(names[:2], shaken(model, 14)))
    front.rollout.update_weights(adapters={"c": model})

    def change():
        for name in names:
            front.rollout.update_weights(adapters={name: shaken(model, 15)}, timeout=1.0)
        front.rollout.unload_lora_adapter("b")

    missing(front, engines[2], change)
    assert adapters_of(engines)[0] != adapters_of(engines)[2]
    serves_again(front, engines[2])
    held = adapters_of(engines)
    assert held[0].keys() == {"a", "c"}
    assert held == [held[0]] * 3
    assert said(engines[2], "a") == said(engines[0], "a")


def test_another_coordinator_knows_the_adapters_of_the_record(
    shared, engines, model, record, alone
):
    shared.fleet.wait_serving(3, 20.0)
    shared.rollout.update_weights(adapters={"math": shaken(model, 16)})
    before, live = said(shared.rollout, "math"), shared.rollout.weight_info().adapters
    shared.close()
    front = Front(record, engines)
    try:
        front.fleet.wait_serving(3, 20.0)
        assert front.rollout.weight_info().adapters == live
        assert said(front.rollout, "math") == before
        front.rollout.update_weights(adapters={"math": shaken(model, 17)})
        front.rollout.rollback()
        assert front.rollout.weight_info().adapters == live
        assert said(front.rollout, "math") == before
    finally:
        front.close()


@pytest.mark.more
def test_members_of_other_layouts_give_each_other_their_adapters(checkpoint, model, tmp_path):
    """A donor of two ranks reads its slots together; who joins cuts them as its linears are."""
    wide = Rollout(checkpoint, tensor_parallel_size=2, **SETTINGS)
    narrow = Rollout(checkpoint, **SETTINGS)
    front = Front(tmp_path / "record", [wide])
    try:
        front.fleet.wait_serving(1, 20.0)
        front.rollout.update_weights(adapters={"math": shaken(model, 20)})
        front.fleet.add(narrow.address)
        front.fleet.wait_serving(2, 20.0)
        eventually(lambda: narrow.metrics().state == "running")
        assert narrow.weight_info().adapter_digests == wide.weight_info().adapter_digests
        assert said(narrow, "math") == said(wide, "math") != said(wide)
    finally:
        front.close()
        narrow.shutdown()
        wide.shutdown()


@pytest.mark.more
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_with_an_adapter_goes_on_elsewhere(checkpoint, model, alone, tmp_path, n):
    params = {"max_tokens": 200, "temperature": 1.0, "seed": 11, "n": n, "ignore_eos": True}
    asked = SamplingParams(adapter="math", **params)
    started = [Rollout(checkpoint, **SETTINGS) for _ in range(3)]
    front = Front(tmp_path / "record", started)
    try:
        front.fleet.wait_serving(3, 20.0)
        version = front.rollout.update_weights(adapters={"math": shaken(model, 21)}).version
        alone.update_weights(adapters={"math": model})
        expected = alone.generate([PROMPTS[0]], asked)[0]
        cut = 0
        for output in front.rollout.stream(PROMPTS[0], asked):
            count = len(output.outputs[0].token_ids)
            if not cut and count > 5:
                cut = count
                running = [engine for engine in started if engine.metrics().running]
                [break_off(engine) for engine in running]
                assert len(running) == 1
        assert 5 < cut < 200
        assert sum(e.metrics().generation_tokens_total for e in started if e not in running) > 0
        for got, want in zip(output.outputs, expected.outputs, strict=True):
            assert got.token_ids == want.token_ids
            assert got.adapter == f"math@{version}"
    finally:
        front.close()
        for engine in started:
            engine.shutdown()
