"""A fleet of real engines behaves as one: its updates, its versions, its members' deaths."""

import copy
import json
import re
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from fleet_front import ENGINE, LEASE, Front, break_off
from shared_engines import TRIES, eventually, standing_still
from tiny_models import randomize, write_tiny

from rollout import Rollout
from rollout.cli.main import make_parser
from rollout.engine.serving_lease import ServingLease
from rollout.errors import (
    ConfigError,
    EngineClosed,
    EngineRestarted,
    InvalidRequest,
    LimitExceeded,
    TransferFailed,
    UpdateInProgress,
    VersionConflict,
    WeightMismatch,
)
from rollout.fleet.coordination.record import Record
from rollout.fleet.fleet import Fleet
from rollout.weight_sync.protocol.membership import Grant

GREEDY = {"max_tokens": 6, "temperature": 0.0}
PROMPTS = [[5, 6, 7, n] for n in range(12)]


@pytest.fixture
def heedless(monkeypatch):
    """Members of an earlier version, which take at their own address what they are sent."""
    monkeypatch.setattr(ServingLease, "check_own_update", lambda self: None)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_one_update_reaches_every_member_and_its_receipt_names_them(
    front, engines, trained, oracle
):
    receipt = front.rollout.update_weights(trained)
    assert receipt.details["members"] == dict.fromkeys(front.names, "committed")
    assert (receipt.version, receipt.epoch) == (1, front.fleet.epoch)
    assert len(receipt.ranks) == 3
    assert receipt.transport == "ipc"  # written once into memory that all of them map
    assert [engine.weight_info().version for engine in engines] == [1, 1, 1]
    outputs = front.rollout.generate(PROMPTS, GREEDY)
    assert tokens(outputs) == tokens(oracle.generate(PROMPTS, GREEDY))
    assert {output.epoch for output in outputs} == {front.fleet.epoch}
    assert {span.version for o in outputs for span in o.outputs[0].weight_versions} == {1}
    assert front.rollout.check_weights(trained).equal
    used = [engine.metrics().prompt_tokens_total for engine in engines]
    assert all(used), "the prompts of one call are spread over all members"


def test_a_refused_update_leaves_all_members_as_they_were(front, engines, trained):
    before = [engine.weight_info().version for engine in engines]
    weights = dict(trained.state_dict())
    weights.pop("model.norm.weight")
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight"):
        front.rollout.update_weights(weights.items())
    weights = {**trained.state_dict(), "model.norm.weight": trained.model.norm.weight[:3]}
    with pytest.raises(WeightMismatch, match=r"members .*model\.norm\.weight") as refused:
        front.rollout.update_weights(list(weights.items()))
    assert str(refused.value).count("model.norm.weight") == 1
    assert all(name in str(refused.value) for name in front.names)
    stats = front.rollout.metrics()
    assert (stats.weight_updates_total, stats.weight_updates_failed_total) == (0, 2)
    assert len(stats.weight_update_errors) == 2
    twice = [*trained.state_dict().items(), ("model.norm.weight", torch.ones(64))]
    with Rollout.connect(engines[0].address) as client:
        for rollout in (front.rollout, client):  # which the trainer finds by itself
            with pytest.raises(WeightMismatch, match="two different tensors"):
                rollout.update_weights(twice)
    assert front.rollout.metrics().weight_updates_failed_total == 3
    assert front.rollout.metrics().members == dict.fromkeys(front.names, "serving, version 0")
    before_it_began = "before it began: "
    assert front.rollout.metrics().weight_update_errors[-1].startswith(before_it_began)
    assert engines[0].metrics().weight_update_errors[-1].startswith(before_it_began)
    assert [engine.weight_info().version for engine in engines] == before
    assert len(front.fleet.serving()) == 3
    assert front.rollout.update_weights(trained).details["members"].keys() == set(front.names)


def test_a_record_that_breaks_gives_up_its_update_alone(front, trained, monkeypatch):
    def broken(promise):
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as disk:
        disk.setattr(front.fleet.record, "write", broken)
        with pytest.raises(TransferFailed, match="disk I/O error"):
            front.rollout.update_weights(trained, timeout=20.0)
    assert front.rollout.update_weights(trained).version == 1
    assert len(front.fleet.serving()) == 3


def test_a_rollback_is_one_transaction_of_all_members(
    front, engines, trained, checkpoint, heedless
):
    first = tokens(front.rollout.generate(PROMPTS, GREEDY))
    with pytest.raises(VersionConflict, match="no predecessor"):
        front.rollout.rollback()
    front.rollout.update_weights(trained)
    late = Rollout(checkpoint, **ENGINE)
    try:
        name = front.fleet.add(late.address)
        front.fleet.wait_serving(4, 60.0)
        receipt = front.rollout.rollback()
        assert (receipt.version, receipt.transport) == (2, "rollback")
        assert receipt.details["members"].pop(name) == "committed"  # it began with those weights
        assert receipt.details["members"] == dict.fromkeys(front.names, "committed")
        assert [engine.weight_version for engine in engines] == [2, 2, 2]
        outputs = front.rollout.generate(PROMPTS, GREEDY)
        assert tokens(outputs) == first
        assert {span.version for o in outputs for span in o.outputs[0].weight_versions} == {2}
        with pytest.raises(VersionConflict, match="no predecessor"):
            front.rollout.rollback()
        other = copy.deepcopy(trained)
        randomize(other)
        front.rollout.update_weights(trained)  # 3
        front.rollout.update_weights(other)  # 4
        engines[2].update_weights(trained, version=9)  # past the fleet: not what was before 4
        receipt = front.rollout.rollback()
        assert receipt.details["members"].get(front.names[2], "fenced").startswith("fenced")
        assert front.rollout.check_weights(trained).equal
        assert front.rollout.update_weights(other).version == 6
    finally:
        late.shutdown()


def test_members_that_cannot_go_back_leave_the_fleet_as_it_was(front, engines, trained):
    front.rollout.update_weights(trained)
    for engine in engines[:2]:
        engine.sleep(1)
        engine.wake_up()
    with pytest.raises(VersionConflict, match=r"members? .* what was live before is gone"):
        front.rollout.rollback()
    assert [engine.weight_version for engine in engines] == [1, 1, 1]
    assert front.rollout.check_weights(trained).equal
    assert front.rollout.update_weights(trained).version == 2


def test_bytes_over_the_channel_reach_every_member(front, engines, trained, oracle):
    front.rollout.update_weights(trained, transport="inline")
    assert tokens(front.rollout.generate(PROMPTS, GREEDY)) == tokens(
        oracle.generate(PROMPTS, GREEDY)
    )
    with Rollout.connect(front.rollout.address) as client:
        receipt = client.update_weights(trained, transport="grpc_stream")
        assert receipt.version == client.weight_version == 2
        assert len(receipt.ranks) == 3


def test_a_dead_member_is_fenced_and_the_rest_commits(engines, tmp_path, trained, oracle):
    front = Front(tmp_path / "record", engines, lease=5.0)
    try:
        engines[1].shutdown()  # the update begins before its lease runs out
        receipt = front.rollout.update_weights(trained)
        members = receipt.details["members"]
        said = [members[name][:9] for name in front.names]
        assert said == ["committed", "fenced: t", "committed"]
        assert tokens(front.rollout.generate(PROMPTS, GREEDY)) == tokens(
            oracle.generate(PROMPTS, GREEDY)
        )
    finally:
        front.close()


def test_calls_go_on_elsewhere_when_their_member_dies(engines, tmp_path):
    front = Front(tmp_path / "record", engines, lease=6.0)
    try:
        expected = tokens(front.rollout.generate(PROMPTS, GREEDY))
        engines[0].shutdown()  # the front has not heard of it yet
        assert front.names[0] in [link.name for link in front.fleet.serving()]
        assert tokens(front.rollout.generate(PROMPTS, GREEDY)) == expected
    finally:
        front.close()


def test_calls_outlast_a_moment_in_which_no_member_may_serve(front, engines):
    """As on a host so busy that every lease runs out."""
    params = {"max_tokens": 150, "temperature": 0.0, "ignore_eos": True}
    stream = front.rollout.stream([1, 2], params)
    next(stream)
    for engine in engines:
        lease = engine._async.backend.core.serving
        lease.grant(0.0, lease._newest)
    assert front.rollout.generate(PROMPTS, GREEDY)[-1].finished
    assert len(list(stream)[-1].outputs[0].token_ids) == 150


def test_an_update_outlasts_a_moment_in_which_too_few_members_serve(front, trained, monkeypatch):
    """As after the front itself was stopped for longer than its leases."""
    coordinator, until = type(front.fleet._state), time.monotonic() + 0.5
    serving = coordinator.serving
    monkeypatch.setattr(
        coordinator,
        "serving",
        property(lambda self: serving.fget(self)[: None if time.monotonic() > until else 1]),
    )
    assert set(front.rollout.update_weights(trained).details["members"].values()) == {"committed"}


def test_fewer_members_than_the_quorum_abort_the_update_everywhere(front, engines, trained):
    engines[0].shutdown()
    engines[1].shutdown()
    with pytest.raises(TransferFailed, match=r"1 of 2|a commit needs 2|does not answer"):
        front.rollout.update_weights(trained)
    eventually(lambda: len(front.fleet.serving()) == 1)
    with pytest.raises(TransferFailed, match=r"a commit needs 2: .*; version 0 serves on"):
        front.rollout.update_weights(trained)
    assert engines[2].weight_info().version == 0
    assert front.rollout.generate([[1, 2, 3]], GREEDY)[0].finished


def test_a_member_that_joins_gets_the_live_weights_from_another_first(
    front, engines, trained, oracle, checkpoint
):
    front.rollout.update_weights(trained)
    late = Rollout(checkpoint, device="cpu", num_threads=1, num_kv_blocks=64)
    try:
        name = front.fleet.add(late.address)
        front.fleet.wait_serving(4, 60.0)
        assert late.weight_info().version == 1
        assert late.check_weights(trained).equal
        assert tokens(late.generate(PROMPTS, GREEDY)) == tokens(oracle.generate(PROMPTS, GREEDY))
        assert name in front.rollout.update_weights(trained).details["members"]
        front.fleet.remove(name)
        assert name not in front.rollout.update_weights(trained).details["members"]
    finally:
        late.shutdown()


def test_an_update_of_the_moment_ends_what_a_joiner_is_sent_and_brings_it_up_itself(
    front, engines, trained, checkpoint
):
    changes = {"encoding": "delta", "timeout": 12.0}
    front.rollout.update_weights(trained, **changes)
    donors = [engine._async.backend.coordinator for engine in engines]
    with Rollout(checkpoint, **ENGINE) as late, ThreadPoolExecutor(1) as pool:
        there = late._async.backend.coordinator
        there.turn.take(None, 30)  # so that what it is sent has to wait
        name = front.fleet.add(late.address)
        eventually(lambda: "staging" in [donor.turn.state for donor in donors])
        front.fleet._state.members[name].fails = 3  # as if others had tried
        update = pool.submit(front.rollout.update_weights, trained, **changes)
        eventually(lambda: not front.fleet._state.idle)
        time.sleep(0.2)
        there.turn.end(None)
        receipt = update.result(60)
        assert receipt.details["members"] == dict.fromkeys([*front.names, name], "committed")
        assert "too closely" in receipt.details["encoding_reason"]
        for _ in range(2):  # at once, and it is there
            receipt = front.rollout.update_weights(trained)
            assert receipt.details["members"][name] == "committed"
        front.fleet.wait_serving(4, 60.0)
        assert late.weight_info().version == 4
        assert late.check_weights(trained).equal


def test_a_joiner_that_is_not_free_is_left_out_of_the_update(front, engines, trained, checkpoint):
    front.rollout.update_weights(trained)
    donors = [engine._async.backend.coordinator for engine in engines]
    with Rollout(checkpoint, **ENGINE) as late:
        there = late._async.backend.coordinator
        there.turn.take(None, 30)
        name = front.fleet.add(late.address)
        eventually(lambda: "staging" in [donor.turn.state for donor in donors])
        members = front.rollout.update_weights(trained, timeout=3.0).details["members"]
        late_by = f"fenced: member {name} is waited for no more"
        assert members.pop(name).startswith(("fenced: it was not free", late_by))
        assert members == dict.fromkeys(front.names, "committed")
        there.turn.end(None)
        front.fleet.wait_serving(4, 60.0)
        assert late.weight_info().version == 2


def test_a_member_that_serves_refuses_what_its_front_has_not_decided(
    front, engines, trained, oracle
):
    front.rollout.update_weights(trained)
    front.rollout.update_weights(trained)
    member = engines[0]
    refused = pytest.raises(ConfigError, match="send the update to the fleet's own address")
    with Rollout.connect(member.address) as client:
        for one in (member, client):
            with refused:
                one.update_weights(trained)
            with refused:
                one.update_weights(trained, staging="none")
            with refused:
                one.rollback()
    assert [row["status"] for row in front.fleet.members()] == ["serving"] * 3
    assert tokens(front.rollout.generate(PROMPTS, GREEDY)) == tokens(
        oracle.generate(PROMPTS, GREEDY)
    )
    assert front.rollout.update_weights(trained).version == 3
    front.fleet.remove(front.names[0])
    assert member.update_weights(trained).version == 4, "it is no member any more"


def test_an_update_past_the_front_is_told_with_the_member(front, engines, trained, heedless):
    other = copy.deepcopy(trained)
    randomize(other)
    for engine in engines[:2]:
        engine.update_weights(other)
    # By a member's own word, or once the front has seen it, and where it was slow looked again.
    seen = r"it has version 1, which this front has not committed|its version 1 is above the fleet"
    with pytest.raises((VersionConflict, TransferFailed), match=seen) as told:
        front.rollout.update_weights(trained)
    assert "at its own address" in str(told.value)
    assert all(name in str(told.value) for name in front.names[:2])
    eventually(lambda: front.fleet.whys().count("was updated at its own address") == 2)


def test_a_member_whose_weights_somebody_else_changed_is_brought_back(
    front, engines, trained, heedless
):
    front.rollout.update_weights(trained)
    other = copy.deepcopy(trained)
    randomize(other)
    engines[2].update_weights(other)  # past the fleet
    eventually(lambda: len(front.fleet.serving()) < 3)
    front.rollout.update_weights(trained)  # as version 2, which that member has, too
    row = next(r for r in front.fleet.members() if r["name"] == front.names[2])
    assert row["status"] != "serving" or front.rollout.check_weights(trained).equal


def test_a_member_without_a_lease_serves_nobody_and_says_so(engines):
    engine = engines[0]
    with Rollout.connect(engine.address) as client:
        assert client.generate([[1, 2]], GREEDY)[0].finished  # what comes first takes longest
        backend = client._async.backend
        stood = backend.serve(Grant(fence=3, epoch=None))
        assert stood.state == "running"
        grant = Grant(fence=3, serial=2, epoch=stood.epoch, until=stood.clock + 2)
        backend.serve(grant)
        assert client.generate([[1, 2]], GREEDY)[0].finished
        eventually(lambda: client.metrics().state == "fenced", 30)
        with pytest.raises(EngineClosed, match="lease has run out"):
            client.generate([[1, 2]], GREEDY)
        # What was overtaken on its way, and what a stale coordinator says, changes nothing.
        backend.serve(Grant(fence=3, serial=1, epoch=stood.epoch, until=stood.clock + 60))
        assert client.metrics().state == "fenced"
        with pytest.raises(VersionConflict, match="fencing epoch 2 is stale"):
            backend.serve(Grant(fence=2, serial=9, epoch=stood.epoch, until=stood.clock + 60))
        backend.serve(Grant(fence=3, serial=3, epoch=stood.epoch, until=None))
        assert client.generate([[1, 2]], GREEDY)[0].finished
        backend.serve(Grant(fence=4, epoch=None))  # a later coordinator, which begins by asking
        with pytest.raises(VersionConflict, match="fencing epoch 3 is stale"):
            backend.serve(Grant(fence=3, serial=4, epoch=stood.epoch, until=stood.clock + 60))


def test_a_member_that_was_removed_says_so_until_it_is_added_again(front, engines):
    front.fleet.wait_serving(3, 60)
    name, engine = front.names[0], engines[0]
    front.fleet.remove(name)
    eventually(lambda: engine.metrics().state == "fenced")
    with pytest.raises(EngineClosed, match=r"was removed from its fleet.*restart this engine"):
        engine.generate([[1, 2]], GREEDY)
    assert front.fleet.add(engine.address) == name
    eventually(lambda: engine.metrics().state == "running", 60)
    assert engine.generate([[1, 2]], GREEDY)[0].finished


def test_info_says_of_a_member_which_fleet_it_serves_and_for_how_long(front, engines, capsys):
    front.fleet.wait_serving(3, 30.0)

    def info(address, *flags):
        args = make_parser().parse_known(["info", address, *flags])
        assert args.run(args) == 0
        return capsys.readouterr().out

    member, whole = (json.loads(info(a, "--json")) for a in (front.names[0], front.rollout.address))
    for found in (member, whole):
        promise = front.fleet.promise
        assert (found["fleet"], found["fencing_epoch"]) == (promise.fleet, promise.fence)
    assert 0 < member["serving_lease_s"] <= LEASE
    assert (whole["serving_lease_s"], list(whole["members"])) == (None, front.names)
    assert "it is a member of a fleet" in info(front.names[0])
    front.fleet.leave(front.names[0], 0.0)
    eventually(lambda: json.loads(info(front.names[0], "--json"))["serving_lease_s"] == 0, 30)


def test_when_its_coordinator_is_gone_a_fleet_stops_and_another_takes_it_over(
    engines, tmp_path, trained, oracle
):
    front = Front(tmp_path / "record", engines)
    front.rollout.update_weights(trained)
    with pytest.raises(UpdateInProgress, match="another coordinator"):
        Front(tmp_path / "record", engines)
    front.close()
    time.sleep(1.2 * LEASE)
    with pytest.raises(EngineClosed, match="lease has run out"):
        engines[0].generate([[1, 2]], GREEDY)
    front = Front(tmp_path / "record", engines)
    try:
        assert front.fleet.version == front.rollout.weight_version == 1
        assert tokens(front.rollout.generate(PROMPTS, GREEDY)) == tokens(
            oracle.generate(PROMPTS, GREEDY)
        )
    finally:
        front.close()


def test_an_engine_is_a_member_of_one_fleet_at_a_time(engines, tmp_path):
    Record(tmp_path / "first").close()  # so that the first one's fence is the higher
    first = Front(tmp_path / "first", engines[:1], lease=4 * LEASE)
    second = Fleet(Record(tmp_path / "second", LEASE), lease=LEASE)
    address = engines[0].address
    try:
        assert first.rollout.generate([[1, 2]], GREEDY)[0].finished
        with pytest.raises(ConfigError, match=r"another fleet.*DELETE /fleet/members"):
            second.add(address, ask=True)
        second.add(address)
        eventually(lambda: "member of another fleet" in second.whys())
        assert first.rollout.generate([[1, 2]], GREEDY)[0].finished
        # Each fleet counts its coordinators by itself: none is stale because of the other's.
        first.fleet.remove(address)
        second.wait_serving(1, 60)
        assert second.promise.fence < 2
    finally:
        second.close()
        first.close()


def test_an_engine_of_another_model_is_no_member_and_is_told_why(front, engines, tmp_path, caplog):
    write_tiny(tmp_path / "other", intermediate_size=192)
    front.fleet.wait_serving(3, 60)
    why = (
        r"it has another model: 6 of \d+ tensors differ \(model.layers.0.mlp.gate_proj.weight: "
        r"\(192, 64\) there, \(128, 64\) in the fleet\); start it with the fleet's model"
    )
    with Rollout(str(tmp_path / "other"), **ENGINE) as other:
        with pytest.raises(ConfigError, match=f"{other.address} can be no member: {why}"):
            front.fleet.add(other.address, ask=True)
        assert other.generate([[1, 2]], GREEDY)[0].finished  # it serves alone, as before
        front.fleet.add(other.address)  # as one that answers later
        eventually(lambda: re.search(f"{other.address}: {why}", front.fleet.whys()))
    assert "failed" not in caplog.text


@pytest.mark.parametrize("behind", [False, True])
def test_an_engine_of_another_model_does_not_hold_up_updates(front, trained, tmp_path, behind):
    write_tiny(tmp_path / "other", intermediate_size=192)
    if behind:
        front.rollout.update_weights(trained)
    with Rollout(str(tmp_path / "other"), **ENGINE) as other:
        name = front.fleet.add(other.address)
        eventually(lambda: "another model" in front.fleet.whys())
        members = front.rollout.update_weights(trained).details["members"]
        assert members.pop(name).startswith("took no part: it has another model")
        assert set(members.values()) == {"committed"}


def test_a_request_waits_for_the_version_that_it_asks_for(front, engines, trained, oracle):
    begun = threading.Event()

    def ask():
        begun.set()
        return front.rollout.generate(PROMPTS[:2], {**GREEDY, "min_version": 1})

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        begun.wait()
        time.sleep(0.1)
        assert not asked.done()
        front.rollout.update_weights(trained)
        outputs = asked.result(60)
    assert tokens(outputs) == tokens(oracle.generate(PROMPTS[:2], GREEDY))
    assert {span.version for o in outputs for span in o.outputs[0].weight_versions} == {1}


@pytest.mark.parametrize("engines", [{"timeout": 2.0}], indirect=True)
def test_a_version_that_does_not_come_is_said_to_be_of_the_fleets_epoch(front):
    with pytest.raises(VersionConflict, match=r"version 0 is \(of the fleet's epoch, whose"):
        front.rollout.generate(PROMPTS[:1], {**GREEDY, "min_version": 1})


def test_a_client_of_a_front_reads_what_it_wrote_in_the_fleets_epoch(front, trained):
    with Rollout.connect(front.rollout.address, timeout=30) as client:
        receipt = client.update_weights(trained)
        [output] = client.generate([PROMPTS[0]], GREEDY)  # whose epoch no member knows
        session = client.session()
        session.generate(PROMPTS[0], GREEDY)
        assert session.generate([3], GREEDY).epoch == output.epoch == receipt.epoch
        wrong = {**GREEDY, "min_version": 1, "min_version_epoch": receipt.epoch + 1}
        with pytest.raises(EngineRestarted, match=f"this is epoch {receipt.epoch}"):
            client.generate([PROMPTS[0]], wrong)


def test_members_pin_what_they_have_begun(front, engines, trained, oracle):
    long = {**GREEDY, "max_tokens": 200, "ignore_eos": True}
    alone = front.rollout.generate(PROMPTS[0], long)[0].outputs[0].token_ids

    def begin():
        stream = front.rollout.stream(PROMPTS[0], long)
        next(stream)
        return stream

    stream = standing_still(begin, front.rollout, 1)
    receipt = front.rollout.update_weights(trained, in_flight="pin")
    front.rollout.resume_generation()
    outputs = front.rollout.generate(PROMPTS[:3], GREEDY)
    assert tokens(outputs) == tokens(oracle.generate(PROMPTS[:3], GREEDY))
    old = list(stream)[-1].outputs[0]
    assert old.token_ids == alone
    assert {span.version for span in old.weight_versions} == {0}
    assert {span.version for o in outputs for span in o.outputs[0].weight_versions} == {1}
    assert sum(engine.metrics().pinned_steps_total > 0 for engine in engines) == 1
    assert receipt.version == 1


def test_a_group_has_one_version_through_a_front(front, engines, trained):
    """Its requests go to one member, also those that come after the commit, and are pinned there
    because one of them asks; the update says nothing of pins.
    """
    long = {**GREEDY, "max_tokens": 200, "ignore_eos": True, "group_id": "g"}

    def begin():
        stream = front.rollout.stream(PROMPTS[0], {**long, "pin": True})
        next(stream)
        return stream

    stream = standing_still(begin, front.rollout, 1)
    front.rollout.update_weights(trained)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(front.rollout.generate, PROMPTS[1:4], long)
        eventually(lambda: sum(engine.metrics().waiting for engine in engines) == 3)
        front.rollout.resume_generation()
        group = [list(stream)[-1], *late.result(60)]
    assert {s.version for o in group for s in o.outputs[0].weight_versions} == {0}
    [other] = front.rollout.generate([PROMPTS[1]], GREEDY)
    assert {span.version for span in other.outputs[0].weight_versions} == {1}
    assert sum(engine.metrics().pinned_steps_total > 0 for engine in engines) == 1


@pytest.mark.parametrize("engines", [{"deterministic": True}], indirect=True, ids=[""])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_goes_on_elsewhere_behind_what_was_delivered(front, engines, checkpoint, n):
    """With the bits of an undisturbed run, since the engines are deterministic."""
    params = {"max_tokens": 200, "temperature": 1.0, "seed": 11, "n": n, "ignore_eos": True}
    params |= {"logprobs": 2}
    with Rollout(checkpoint, deterministic=True, **ENGINE) as whole:
        expected = whole.generate("three two one", params)[0]
    for _ in range(TRIES):  # a stream may be over before this test has looked
        cut = 0
        for output in front.rollout.stream("three two one", params):
            count = len(output.outputs[0].token_ids)
            if not cut and count > 60:
                running = [engine for engine in engines if engine.metrics().running]
                if not running:
                    break
                cut = count
                [break_off(engine) for engine in running]
                assert len(running) == 1
        if cut:
            break
    assert 60 < cut < 200
    assert sum(e.metrics().generation_tokens_total for e in engines if e not in running) > 0
    for got, want in zip(output.outputs, expected.outputs, strict=True):
        assert (got.token_ids, got.text) == (want.token_ids, want.text)
        assert got.logprobs == want.logprobs
        assert len(got.logprobs.top) == 200
        assert [span.version for span in got.weight_versions] == [0]
        assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-2)
    assert output.prompt == "three two one"


def test_what_cannot_be_continued_is_refused_by_name(engines):
    from rollout.generation import ContinuedPrompt

    done = engines[0].generate([[1, 2, 3]], GREEDY)[0].outputs[0]
    for why, delivered, params in (
        ("have finished", (done,), GREEDY),
        ("2 samples", (done,), {"n": 2}),
        ("none that can", (replace(done, token_ids=[999999] * 6, finish_reason=None),), {"n": 1}),
        ("none that can", (replace(done, weight_versions=(), finish_reason=None),), {"n": 1}),
    ):
        with pytest.raises(InvalidRequest, match=why):
            engines[0].generate([ContinuedPrompt((1, 2, 3), delivered)], params)


def test_what_a_fleet_cannot_do_is_refused_by_name(front, engines, trained):
    with pytest.raises(ConfigError, match="in_flight='wait' is for one engine"):
        front.rollout.update_weights(trained, in_flight="wait")
    with pytest.raises(ConfigError, match=r"use sleep\(level=1\)"):
        front.rollout.sleep(2)
    assert front.rollout.update_weights(trained).version == 1


def test_one_members_refusal_of_the_request_ends_it_for_all(front, engines, trained):
    front.rollout.update_weights(trained)
    engines[0].sleep(1)  # which gives up its shadow: an update takes more memory there
    engines[0].wake_up()
    front.fleet.wait_serving(3, 60.0)
    size = sum(meta.nbytes for meta in engines[0].weight_info().tensors)
    with pytest.raises(LimitExceeded, match=rf"member {front.names[0]}: .*max_extra_memory"):
        front.rollout.update_weights(trained, max_extra_memory=size // 2, bucket_bytes=1 << 16)
    assert [engine.weight_version for engine in engines] == [1, 1, 1]
    eventually(lambda: [engine.weight_info().state for engine in engines] == ["idle"] * 3)
    front.fleet.wait_serving(3, 60.0)
    receipt = front.rollout.update_weights(trained)
    assert receipt.details["members"] == dict.fromkeys(front.names, "committed")


def test_a_fleet_that_sleeps_refuses_calls_at_once(front, caplog):
    front.rollout.sleep(1)
    begun = time.monotonic()
    with pytest.raises(EngineClosed, match=r"^the engine is asleep; call wake_up first$"):
        front.rollout.generate([[1, 2]], GREEDY)
    assert "failed" not in caplog.text
    assert time.monotonic() - begun < 25
    front.rollout.wake_up()
    assert front.rollout.generate([[1, 2]], GREEDY)[0].finished


def test_a_fleet_of_reward_models_is_one_reward_model(tmp_path):
    old = write_tiny(tmp_path / "old", labels=1)
    new = write_tiny(tmp_path / "new", labels=1, seed=1)
    with (
        Rollout(str(tmp_path / "old"), **ENGINE, task="reward") as first,
        Rollout(str(tmp_path / "old"), **ENGINE, task="reward") as second,
    ):
        front = Front(tmp_path / "record", [first, second])
        try:
            for model in (old, new):
                if model is new:
                    front.rollout.update_weights(model)
                outputs = front.rollout.classify(PROMPTS)
                with torch.no_grad():
                    wanted = [float(model(torch.tensor([ids])).logits[0, 0]) for ids in PROMPTS]
                assert [output.reward for output in outputs] == pytest.approx(wanted, abs=1e-4)
                assert {output.weight_version for output in outputs} == {int(model is new)}
                assert {output.epoch for output in outputs} == {front.fleet.epoch}
            assert front.rollout.server_info().task == "classify"
            with pytest.raises(InvalidRequest, match="no LM head"):
                front.rollout.generate(PROMPTS, GREEDY)
        finally:
            front.close()
