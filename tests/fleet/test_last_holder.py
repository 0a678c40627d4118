"""What is live is not lost with a member that leaves while no other holds it."""

import signal
from dataclasses import replace

import pytest
from fleet_front import front_process
from serving import serve
from shared_engines import eventually
from test_coordinator import LEASE, LIVE, fills, serving, stand
from test_leaving import FLAGS, PROMPTS, row, tokens
from test_processes import wait_serving

from rollout import Rollout
from rollout.fleet.coordination.actions import Ask, Check, Fill, Write
from rollout.fleet.coordination.coordinator import Coordinator
from rollout.fleet.coordination.member_log import MemberLog
from rollout.fleet.simulation.findings import Weather
from rollout.fleet.simulation.simulator import Simulation

ANOTHER = {"epoch": 1234, "version": 0}  # a process in the place of one that has ended


def asks(fleet, name, now):
    return [fleet._ask(fleet.members[name], now)]


def restarted(fleet, name, now):
    return stand(fleet, name, asks(fleet, name, now), now, **ANOTHER)


def has_left(fleet, name, now):
    """It says that it leaves, and that nothing runs there."""
    stand(fleet, name, asks(fleet, name, now), now, state="leaving")
    return stand(fleet, name, asks(fleet, name, now + 0.6), now + 0.6, state="leaving")


def test_a_member_that_leaves_stays_until_another_has_its_copy() -> None:
    fleet = serving("a", "b")
    assert fills(restarted(fleet, "b", 0.6)) == [Fill("b", "a", 4)]
    assert has_left(fleet, "a", 0.7) == []
    assert not fleet.serves_none("a", 1.3), "its lease is kept up"
    fleet.checked("b", 4, 77, 1.4)
    over = stand(fleet, "a", asks(fleet, "a", 2.0), 2.0, state="leaving")
    assert [action.grant.until for action in over if isinstance(action, Ask)] == [0.0]


def test_a_member_that_leaves_does_not_count_on_one_that_is_silent() -> None:
    fleet = serving("a", "b")
    until = fleet.members["b"].serves_until
    assert has_left(fleet, "a", until - 0.5) == []
    fleet.tick(until)
    assert stand(fleet, "a", asks(fleet, "a", until), until, state="leaving") == []
    stand(fleet, "b", asks(fleet, "b", until + 0.1), until + 0.1)  # it was stopped
    over = stand(fleet, "a", asks(fleet, "a", until + 0.2), until + 0.2, state="leaving")
    assert [action.grant.until for action in over if isinstance(action, Ask)] == [0.0]


def test_nobody_stays_for_the_sake_of_those_that_leave_too() -> None:
    fleet = serving("a", "b")
    for name in "ab":
        stand(fleet, name, asks(fleet, name, 0.6), 0.6, state="leaving")
    for name in "ab":
        over = stand(fleet, name, asks(fleet, name, 1.3), 1.3, state="leaving")
        assert [action.grant.until for action in over] == [0.0]


def left_last():
    """A fleet of a, which has left and answers still, and b, another process since."""
    fleet = serving("a", "b")
    has_left(fleet, "a", 0.6)
    assert fleet.serving == ["b"]
    return fleet, restarted(fleet, "b", 1.8)


def test_who_has_left_and_answers_still_brings_others_up_to_date() -> None:
    fleet, found = left_last()
    assert fills(found) == [Fill("b", "a", 4)]
    fleet.checked("b", 4, 77, 2.0)
    assert (fleet.serving, fleet.promise) == (["b"], LIVE)


def test_the_log_says_what_no_member_holds_any_more(caplog) -> None:
    said = MemberLog()
    for promise in (LIVE, replace(LIVE, version=9), replace(LIVE, epoch=LIVE.epoch + 1, version=0)):
        said.look([], promise, 0.0)
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "no member holds version 9 any more: version 0 serves" in record.getMessage()


def test_a_new_epoch_is_founded_once_who_has_left_answers_no_more() -> None:
    fleet, _ = left_last()
    fleet.unfilled("b", "it does not answer", 2.0)

    def founded(now):
        actions = fleet.tick(now)
        for action in actions:
            asked_b = isinstance(action, Ask) and action.member == "b"
            if asked_b and fills(stand(fleet, "b", [action], now, **ANOTHER)):
                fleet.unfilled("b", "its donor does not answer", now)
        return any(isinstance(action, Write) for action in actions)

    times = [now / 10 for now in range(20, 80) if founded(now / 10)]
    assert 1.2 + 2 * LEASE <= times[0] <= 1.9 + 2 * LEASE


def test_a_later_coordinator_looks_at_what_holds_who_has_left() -> None:
    fleet = Coordinator(LIVE, quorum=1, lease=LEASE, now=0.0)
    first = {name: fleet.add(name, 0.0) for name in "ab"}
    stand(fleet, "a", first["a"], 0.0, state="leaving")
    found = stand(fleet, "b", first["b"], 0.0, **ANOTHER)
    assert found == [Check("a")]
    assert not any(isinstance(action, Write) for action in fleet.tick(0.3)), "a may hold it"
    fleet.checked("a", 4, 77, 0.4)
    assert fills(restarted(fleet, "b", 1.2)) == [Fill("b", "a", 4)]


def test_a_simulated_fleet_keeps_what_a_member_that_leaves_holds_alone() -> None:
    for moment in (0.0, 0.3, 0.9, 1.5, 2.5):
        fleet = Simulation(members=2, seed=1, weather=Weather(delay=0.02, stage=0.2, loss=0.0))
        fleet.pass_time(3.0)
        outcomes = []
        assert fleet.update(outcomes.append)
        fleet.pass_time(3.0)
        epoch = fleet.durable.epoch
        fleet.faults.leave("m0", 8.0)
        fleet.pass_time(moment)
        fleet.faults.restart("m1", 1.0)
        fleet.rest()
        assert outcomes == [True]
        assert (fleet.durable.epoch, fleet.engines["m1"].version) == (epoch, 1)


@pytest.mark.more
def test_an_engine_that_is_told_to_end_waits_until_another_has_its_copy(
    checkpoint, trained, tmp_path
):
    with (
        serve(checkpoint, *FLAGS, "--shutdown-timeout", "120") as one,
        serve(checkpoint, *FLAGS) as two,
        front_process(tmp_path / "record", one.grpc, two.grpc) as front,
        Rollout.connect(front.grpc) as client,
    ):
        wait_serving(front.http, 2)
        live = client.update_weights(trained, timeout=20)
        expected = tokens(client.generate(PROMPTS, {"max_tokens": 5, "temperature": 0.0}))
        two.process.send_signal(signal.SIGKILL)
        wait_serving(front.http, 1)
        one.process.send_signal(signal.SIGTERM)
        eventually(lambda: row(front.http, one.grpc)["status"] == "leaving")
        with serve(checkpoint, *FLAGS, "--grpc-port", two.grpc.rpartition(":")[2]):
            assert one.process.wait(120) == 0
            wait_serving(front.http, 1)
            info = client.weight_info()
            assert (info.epoch, info.version) == (live.epoch, live.version)
            found = client.generate(PROMPTS, {"max_tokens": 5, "temperature": 0.0})
            assert tokens(found) == expected
