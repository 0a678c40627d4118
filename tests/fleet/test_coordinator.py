"""Single turns of the coordinator's state machine, in which a fleet could stick or lie."""

from dataclasses import replace
from itertools import pairwise

import pytest

from rollout.errors import ConfigError, VersionConflict
from rollout.fleet.coordination.actions import Ask, Check, Ended, Fill, Promise, Tell, Write
from rollout.fleet.coordination.coordinator import Coordinator
from rollout.weight_sync.protocol.adapters import HeldAdapter
from rollout.weight_sync.protocol.membership import Grant, Standing

LEASE = 2.0
LIVE = Promise(fence=3, epoch=9, version=4, digest=77, update_id="u4")


def serving(*names: str, quorum: int = 2) -> Coordinator:
    """A fleet whose members all serve version 4, at time 0."""
    fleet = Coordinator(LIVE, quorum=quorum, lease=LEASE, now=0.0)
    for name in names:
        stand(fleet, name, fleet.add(name, 0.0), 0.0)
        fleet.checked(name, 4, 77, 0.0)
    assert fleet.serving == list(names)
    return fleet


def standing(name: str, **given) -> Standing:
    given = {
        "epoch": int.from_bytes(name.encode()),
        "clock": 50.0,
        "version": 4,
        "state": "running",
        **given,
    }
    return Standing(**given)


def stand(fleet: Coordinator, name: str, asked, now: float, **given):
    grant = next(action.grant for action in asked if isinstance(action, Ask))
    return fleet.stood(name, grant, standing(name, **given), now)


def asked(fleet: Coordinator, name: str, now: float):
    return [a for a in fleet.tick(now) if isinstance(a, Ask) and a.member == name]


def told(actions):
    return [(a.member, a.decision.update_id, a.decision.commit) for a in actions if type(a) is Tell]


def test_a_vote_behind_the_abort_is_answered_by_it() -> None:
    fleet = serving("a", "b")
    fleet.begin("u5", None, 0.0)
    ended = fleet.died("b", 0.1)
    assert [type(a) for a in ended] == [Ended]
    assert fleet.voted("u5", "a", 1, 0.2) == []
    late = stand(fleet, "a", asked(fleet, "a", 0.6), 0.6, prepared="u5")
    assert told(late) == [("a", "u5", False)]
    # An abort that was lost on its way is said again, too.
    assert told(stand(fleet, "a", asked(fleet, "a", 1.2), 1.2, prepared="u5")) == told(late)


def test_a_member_that_was_left_with_the_last_commit_commits() -> None:
    fleet = Coordinator(LIVE, quorum=1, lease=LEASE, now=0.0)
    actions = stand(fleet, "a", fleet.add("a", 0.0), 0.0, version=3, prepared="u4")
    assert told(actions) == [("a", "u4", True)]


def test_a_commit_waits_for_a_member_that_was_removed_while_it_served() -> None:
    fleet = serving("a", "b", "c")
    until = fleet.members["c"].serves_until
    removed = fleet.remove("c", 0.5)
    assert [a.grant.until for a in removed if isinstance(a, Ask)] == [0.0]
    assert commit(fleet, "ab", 0.6) == []
    assert fleet.tick(until - 0.01) is not None
    assert fleet.update is not None, "c may serve version 4 until its lease is over"
    assert any(isinstance(a, Ended) for a in fleet.tick(until + 0.01))


def commit(fleet: Coordinator, names: str, now: float):
    """Up to both answers; what the coordinator asks for after them, grants apart."""
    fleet.begin("u5", None, now)
    for name in names:
        fleet.voted("u5", name, 88, now)
    [write] = fleet.commit("u5", now)
    assert isinstance(write, Write)
    fleet.written(write.promise, now)
    last = []
    for name in names:
        last = fleet.decided("u5", name, "", now)
    return [action for action in last if not isinstance(action, Ask)]


def test_a_member_that_is_replaced_during_a_commit_holds_nothing_up() -> None:
    fleet = serving("a", "b")
    fleet.begin("u5", None, 0.0)
    for name in "ab":
        fleet.voted("u5", name, 88, 0.0)
    [write] = fleet.commit("u5", 0.0)
    fleet.written(write.promise, 0.0)
    fleet.decided("u5", "b", "", 0.0)
    fleet.add("a", 0.1)  # at an address where nobody is
    assert any(isinstance(a, Ended) and a.committed for a in fleet.tick(5.0))


def test_a_later_coordinator_waits_for_the_leases_of_the_earlier_one() -> None:
    fleet = Coordinator(LIVE, quorum=1, lease=LEASE, now=0.0, earlier=30.0)
    stand(fleet, "a", fleet.add("a", 0.0), 0.0)
    fleet.checked("a", 4, 77, 0.0)
    assert commit(fleet, "a", 0.1) == []
    fleet.members["a"].serves_until = 1e9  # it goes on serving, with what is committed
    assert not any(isinstance(a, Ended) for a in fleet.tick(31.0))
    assert any(isinstance(a, Ended) for a in fleet.tick(31.6))


@pytest.mark.parametrize(("now", "longest"), [(0.1, 30.0), (31.6, LEASE)])
def test_once_those_have_ended_the_record_has_its_own_lease_alone(
    now: float, longest: float
) -> None:
    live = replace(LIVE, lease=30.0)
    fleet = Coordinator(live, quorum=1, lease=LEASE, now=0.0, earlier=30.0)
    stand(fleet, "a", fleet.add("a", now), now)
    fleet.checked("a", 4, 77, now)
    fleet.begin("u5", None, now)
    fleet.voted("u5", "a", 88, now)
    [write] = fleet.commit("u5", now)
    assert write.promise.lease == longest


def test_what_was_asked_before_a_commit_does_not_fence_who_has_committed() -> None:
    fleet = serving("a", "b")
    early = asked(fleet, "a", 0.6)
    assert [type(a) for a in commit(fleet, "ab", 0.7)] == [Ended]
    stand(fleet, "a", early, 0.8)  # it stood at version 4 then
    assert fleet.serving == ["a", "b"]
    stand(fleet, "a", asked(fleet, "a", 1.4), 1.4)  # and it does now
    assert fleet.serving == ["b"]


def test_a_restarted_member_is_checked_before_it_serves() -> None:
    fleet = serving("a", "b")
    actions = stand(fleet, "a", asked(fleet, "a", 0.6), 0.6, epoch=12345)
    assert fleet.serving == ["b"]
    assert [a for a in actions if isinstance(a, Check)] == [Check("a")]
    fleet.checked("a", 4, 78, 0.7)
    assert fleet.serving == ["b"]
    fleet.checked("a", 4, 77, 0.8)
    assert fleet.serving == ["a", "b"]


def test_a_record_that_cannot_be_written_commits_nothing() -> None:
    fleet = serving("a", "b")
    fleet.begin("u5", None, 0.0)
    for name in "ab":
        fleet.voted("u5", name, 88, 0.0)
    fleet.commit("u5", 0.0)
    actions = fleet.unwritten("the disk is full", 0.1)
    assert told(actions) == [("a", "u5", False), ("b", "u5", False)]
    assert actions[-1] == Ended("u5", False, "the disk is full")
    assert fleet.promise == replace(LIVE)


def test_a_grant_names_an_end_by_the_members_own_clock() -> None:
    fleet = serving("a", "b")
    ask, _ = fleet.serve(0.6)
    assert ask.grant == Grant(
        fence=3, serial=ask.grant.serial, epoch=standing("a").epoch, until=50.0 + LEASE
    )


def test_before_the_fleet_begins_a_grant_says_when_its_engine_is_its_own_again() -> None:
    fleet = serving("a", "b")
    [ask] = asked(fleet, "a", 0.6)
    assert (ask.grant.until, ask.grant.returns) == (50.0 + LEASE, 50.0 + LEASE)
    fleet.begin("u1", None, 0.7)  # whoever begins with an update has begun, too
    [ask] = asked(fleet, "a", 1.3)
    assert ask.grant.returns is None


def test_a_promise_says_which_adapters_are_live_and_which_a_rollback_brings_back() -> None:
    old, new = (HeldAdapter("math", 4, 5),), (HeldAdapter("math", 5, 6),)
    fleet = Coordinator(replace(LIVE, adapters=old), quorum=1, lease=LEASE, now=0.0)
    stand(fleet, "a", fleet.add("a", 0.0), 0.0)
    fleet.checked("a", 4, 77, 0.0, old)

    def made(update_id: str, adapters, **how) -> Promise:
        fleet.begin(update_id, None, 0.1, **how)
        fleet.voted(update_id, "a", 88, 0.1, adapters)
        [write] = fleet.commit(update_id, 0.1)
        fleet.written(write.promise, 0.1)
        fleet.decided(update_id, "a", "", 0.1)
        return fleet.promise

    promise = made("u5", new)
    assert (promise.adapters, promise.adapters_before, promise.before) == (new, old, 77)
    promise = made("u6", old, back=True)
    assert (promise.adapters, promise.adapters_before, promise.before) == (old, (), 0)
    made("u7", new)
    promise = made("u8", (), reversible=False)  # it is unloaded
    assert (promise.adapters, promise.adapters_before, promise.before) == ((), (), 0)
    with pytest.raises(VersionConflict, match="not once an adapter has been unloaded"):
        fleet.begin("u9", None, 0.2, back=True)


def test_a_version_is_named_so_low_that_others_can_follow() -> None:
    fleet = serving("a", "b")
    with pytest.raises(ConfigError, match="at most 4503599627370496, or one above the live"):
        fleet.begin("u5", (1 << 52) + 1, 0.0)
    assert fleet.begin("u5", 1 << 52, 0.0)[1] == 1 << 52


def test_what_was_asked_during_a_commit_does_not_fence_who_has_committed() -> None:
    fleet = serving("a", "b")
    fleet.begin("u5", None, 0.6)
    for name in "ab":
        fleet.voted("u5", name, 88, 0.6)
    [write] = fleet.commit("u5", 0.6)
    fleet.written(write.promise, 0.6)
    early = asked(fleet, "a", 0.65)
    assert early
    for name in "ab":
        last = fleet.decided("u5", name, "", 0.7)
    assert Ended("u5", True) in last
    stand(fleet, "a", early, 0.75)  # it was asked before it committed
    assert fleet.serving == ["a", "b"]


def joining():
    """A fleet of a and b, and c that joins by update u5, for which all have voted."""
    fleet = serving("a", "b")
    stand(fleet, "c", fleet.add("c", 0.0), 0.0, version=3)
    fleet.begin("u5", None, 0.0, joins=True)
    fleet.unfilled("c", "its donor went on", 0.0)
    for name in "abc":
        fleet.voted("u5", name, 88, 0.0)
    return fleet


def test_a_member_that_is_brought_up_to_date_once_more_says_how_it_failed() -> None:
    fleet = serving("a", "b")
    stand(fleet, "c", fleet.add("c", 0.0), 0.0, version=3)
    assert fleet.members["c"].why == "it is being brought up to date"
    fleet.unfilled("c", "a does not reach it", 0.0)
    stand(fleet, "c", [fleet._ask(fleet.members["c"], 1.1)], 1.1, version=3)
    assert fleet.members["c"].why == "it is being brought up to date once more; a does not reach it"


def test_who_is_behind_joins_by_the_next_whole_update_however_close_they_follow() -> None:
    """Each update ends what another sends it: it would be behind for ever."""
    fleet = serving("a", "b")
    joined = stand(fleet, "c", fleet.add("c", 0.0), 0.0, version=3)
    assert [type(action) for action in joined] == [Fill]
    now = 0.1
    assert fleet.begin("adapters", None, now)[0] == ["a", "b"], "they bring what it lacks alone"
    fleet.give_up("adapters", "of no use", now)
    fleet.begin("u5", None, now, joins=True)
    fleet.unfilled("c", "its donor went on", now)
    for name in "abc":
        fleet.voted("u5", name, 88, now)
    [write] = fleet.commit("u5", now)
    written = fleet.written(write.promise, now)
    assert [action.member for action in written if type(action) is Tell] == ["a", "b", "c"]
    for name in "abc":
        last = fleet.decided("u5", name, "", now)
    assert Ended("u5", True) in last
    assert fleet.begin("u6", None, now)[0] == ["a", "b"]  # at once
    [ask] = asked(fleet, "c", now)
    granted = stand(fleet, "c", [ask], now, version=5)
    assert fleet.serving == ["a", "b", "c"]
    assert [action.grant.until for action in granted] == [50.0 + LEASE]


def test_who_has_just_joined_takes_part_in_the_update_that_follows_at_once() -> None:
    """Also where it was last heard of between its vote and its commit."""
    fleet = joining()
    now = LEASE / 2
    stand(fleet, "c", asked(fleet, "c", now), now, version=3, prepared="u5")
    [write] = fleet.commit("u5", now)
    fleet.written(write.promise, now)
    for name in "abc":
        fleet.decided("u5", name, "", now)
    assert fleet.begin("u6", None, now, joins=True)[0] == ["a", "b", "c"]


def test_who_is_kept_out_needs_a_whole_update_and_has_some_chances() -> None:
    fleet = serving("a", "b")
    stand(fleet, "c", fleet.add("c", 0.0), 0.0, version=3)
    found = []
    for _ in range(8):
        fleet.unfilled("c", "an update went first", 0.1)
        found.append(fleet.kept_out(0.1))
    assert found == [[], *[["c"]] * 4, [], [], []]
    assert fleet.kept_out(9.0) == []  # not heard of


def test_an_update_of_changes_leaves_a_moment_to_who_is_brought_up_to_date() -> None:
    """Not to one that several others could not bring up, nor to one that cannot be."""
    fleet = serving("a", "b")
    assert not fleet.brings_up(0.0)
    fleet.begin("changes", None, 0.0)
    stand(fleet, "c", fleet.add("c", 0.0), 0.0, version=3)
    assert fleet.brings_up(0.0)  # it can be once that has ended
    fleet.give_up("changes", "of no use", 0.0)
    stand(fleet, "c", asked(fleet, "c", 1.1), 1.1, version=3)
    assert fleet.members["c"].busy
    assert fleet.brings_up(1.1)
    fleet.unfilled("c", "a does not reach it", 1.1)
    assert not fleet.brings_up(1.1)  # it is not tried again yet
    assert fleet.brings_up(2.2)
    assert not fleet.brings_up(9.0)  # not heard of
    fleet.unfilled("c", "b does not reach it", 2.2)
    assert not fleet.brings_up(4.9)
    stand(fleet, "d", fleet.add("d", 0.0), 0.0, version=3, state="loading")
    assert not fleet.brings_up(0.0)


def test_a_joiner_that_goes_silent_behind_its_vote_does_not_hold_up_the_commit() -> None:
    fleet = joining()
    [write] = fleet.commit("u5", 0.0)
    fleet.written(write.promise, 0.0)
    for name in "ab":
        fleet.decided("u5", name, "", 0.0)
    assert not any(isinstance(action, Ended) for action in fleet.tick(LEASE / 2))
    [ended] = [action for action in fleet.tick(LEASE + 0.05) if isinstance(action, Ended)]
    assert (ended.committed, dict(ended.lost)) == (True, {"c": "it did not commit in time"})
    assert told(stand(fleet, "c", asked(fleet, "c", 9.0), 9.0, version=3, prepared="u5")) == [
        ("c", "u5", True)
    ]


def test_who_is_not_heard_of_or_refuses_keeps_no_update_waiting() -> None:
    fleet = serving("a", "b")
    stand(fleet, "c", fleet.add("c", 0.0), 0.0, version=3)
    fleet.begin("u5", None, 0.1, joins=True)
    fleet.lost("u5", "c", "it was not free", 0.2)
    for name in "ab":
        fleet.voted("u5", name, 88, 0.2)
    assert [type(action) for action in fleet.commit("u5", 0.2)] == [Write]
    fleet.unwritten("full", 0.2)
    fleet.unfilled("c", "no answer", 0.3)
    assert fleet.begin("u6", None, 0.3, joins=True)[0] == ["a", "b", "c"]
    fleet.give_up("u6", "", 0.3)
    assert fleet.begin("u7", None, 9.0, joins=True)[0] == ["a", "b"]


def test_an_answer_to_an_end_of_serving_says_nothing_of_a_later_grant() -> None:
    fleet = serving("a", "b", "c")
    ends, now = [], 0.0
    while now < 5.0:  # c hangs
        now += 0.25
        for action in fleet.tick(now):
            if action.member != "c":
                fleet.stood(action.member, action.grant, standing(action.member, clock=now), now)
            elif action.grant.until == 0:
                ends.append(action)
    early, late = ends[-2:]
    assert fleet.begin("u5", None, now)[0] == ["a", "b"]
    for name in "ab":
        fleet.voted("u5", name, 88, now)
    [granted] = stand(fleet, "c", [late], now, clock=now)
    assert granted.grant.until == now + LEASE
    stand(fleet, "c", [early], now, clock=now)  # it was answered before, and is looked at now
    [write] = fleet.commit("u5", now)
    fleet.written(write.promise, now)
    for name in "ab":
        last = fleet.decided("u5", name, "", now)
    assert not any(isinstance(action, Ended) for action in last), (
        "c may serve version 4 until its lease is over"
    )


def test_an_update_is_committed_once() -> None:
    fleet = serving("a", "b")
    commit(fleet, "ab", 0.1)
    with pytest.raises(VersionConflict, match="u5 is already live as version 5"):
        fleet.begin("u5", None, 0.2)


def test_who_did_not_commit_is_named_with_the_end() -> None:
    fleet = serving("a", "b", "c")
    fleet.begin("u5", None, 0.1)
    for name in "abc":
        fleet.voted("u5", name, 88, 0.1)
    [write] = fleet.commit("u5", 0.1)
    fleet.written(write.promise, 0.1)
    for name in "ab":
        fleet.decided("u5", name, "", 0.2)
    fleet.decided("u5", "c", "torn", 0.3)
    [ended] = [a for a in fleet.tick(9.0) if isinstance(a, Ended)]
    assert (ended.committed, ended.lost["c"]) == (True, "torn")


def fills(actions):
    return [action for action in actions if isinstance(action, Fill)]


def test_a_member_is_not_brought_up_to_date_from_one_whose_update_is_under_way() -> None:
    fleet = serving("a", "b")
    join = fleet.add("c", 0.1)
    fleet.begin("u5", None, 0.2)
    assert fills(stand(fleet, "c", join, 0.3, version=0)) == []
    assert "when the update under way has ended" in fleet.members["c"].why
    fleet.give_up("u5", "the trainer is gone", 0.4)
    again = stand(fleet, "c", asked(fleet, "c", 1.5), 1.5, version=0)
    assert fills(again) == [Fill("c", "a", 4)]


def test_a_member_that_cannot_be_brought_up_to_date_is_tried_again_ever_later_by_others() -> None:
    fleet = serving("a", "b")
    join, now, tries = fleet.add("c", 0.0), 0.0, []
    found = fills(stand(fleet, "c", join, now, version=0))
    while now < 100.0:
        if found:
            tries.append((now, found[0].donor))
            fleet.unfilled("c", "it does not answer", now)
        now += 0.25
        for action in fleet.tick(now):
            if action.member != "c":
                fleet.stood(action.member, action.grant, standing(action.member, clock=now), now)
        found = fills(stand(fleet, "c", [fleet._ask(fleet.members["c"], now)], now, version=0))
    pauses = [b - a for (a, _), (b, _) in pairwise(tries)]
    assert [donor for _, donor in tries[:4]] == ["a", "b", "a", "b"]
    assert pauses[0] <= 1.25
    assert 7 <= pauses[-1] <= 15.25
    assert 8 < len(tries) < 20


def test_an_engine_of_another_kind_is_left_alone_until_it_is_restarted() -> None:
    fleet = serving("a")
    assert fills(stand(fleet, "c", fleet.add("c", 0.0), 0.0, version=0)) == [Fill("c", "a", 4)]
    fleet.unfit("c", 5, "what was another life's", 0.1)
    assert not fleet.members["c"].unfit
    fleet.unfit("c", standing("c").epoch, "it has another model", 0.2)
    assert fills(stand(fleet, "c", asked(fleet, "c", 1.0), 1.0, version=0)) == []
    assert fleet.members["c"].why == "it has another model"
    assert fleet._admission.joining(LIVE, 1.0) == []
    again = stand(fleet, "c", asked(fleet, "c", 2.0), 2.0, version=0, epoch=5)
    assert fills(again) == [Fill("c", "a", 4)]


def test_a_version_above_the_fleets_is_told_with_both_causes_and_remedies() -> None:
    fleet = serving("a")
    assert stand(fleet, "c", fleet.add("c", 0.0), 0.0, version=6) == []
    why = fleet.members["c"].why
    assert why.startswith("its version 6 is above the fleet's 4: it was updated at its own address")
    assert "(restart it)" in why
    assert "a new or an older one (start it with that of the fleet)" in why


def test_a_new_fleet_looks_at_its_members_again_at_once() -> None:
    """They wait for no tick once it is written what they are compared with."""
    fleet = Coordinator(
        Promise(fence=1, epoch=9, version=0, digest=0), quorum=2, lease=LEASE, now=0.0
    )
    for name in "ab":
        stand(fleet, name, fleet.add(name, 0.0), 0.0, version=0)
    [write] = fleet.checked("a", 0, 77, 0.1)
    assert fleet.checked("b", 0, 77, 0.1) == []
    again = fleet.written(write.promise, 0.2)
    assert [action.member for action in again] == ["a", "b"]
    for ask in again:
        assert stand(fleet, ask.member, [ask], 0.2, version=0) == [Check(ask.member)]
        fleet.checked(ask.member, 0, 77, 0.2)
    assert fleet.serving == ["a", "b"]


def test_no_epoch_is_founded_with_an_engine_of_another_kind() -> None:
    fleet = serving("a")
    stand(fleet, "c", fleet.add("c", 0.0), 0.0, version=6)
    fleet.unfit("c", standing("c").epoch, "it has another model", 0.1)
    asks = asked(fleet, "a", 1.0)
    stand(fleet, "a", asks, 1.0, version=0, epoch=5)  # restarted: nobody holds version 4 any more
    stand(fleet, "c", [fleet._ask(fleet.members["c"], 1.0)], 1.0, version=6)
    [founded] = [a.promise for a in fleet.tick(30.0) if isinstance(a, Write)]
    assert founded.version == 0


def test_a_member_that_leaves_ends_what_it_runs_and_is_said_to_have_left() -> None:
    fleet = serving("a", "b", "c")
    [last] = stand(fleet, "c", asked(fleet, "c", 0.6), 0.6, state="leaving", running=2)
    assert (fleet.serving, fleet.members.staying) == (["a", "b"], 2)
    assert last.grant.until == 50.0 + LEASE, "what runs there may end under a lease"
    assert not fleet.serves_none("c", 0.6)
    assert stand(fleet, "c", [last], 0.7, state="leaving", running=1) == []
    over = stand(fleet, "c", asked(fleet, "c", 1.3), 1.3, state="leaving")
    assert [action.grant.until for action in over] == [0.0]
    stand(fleet, "c", over, 1.4, state="leaving")
    assert fleet.serves_none("c", 1.4), "its lease is given back before it is over"
    [ended] = commit(fleet, "ab", 1.5)
    assert (ended.committed, ended.lost) == (True, {"c": "it left"})
    assert fleet.silent("c", "nobody answers", 1.6) == []
    assert fleet.members["c"].why == "it left"
    back = stand(fleet, "c", over, 1.8, epoch=1234, version=0)
    assert [type(action) for action in back] == [Fill], "another process in its place joins"


def test_a_commit_without_a_member_that_leaves_ends_its_lease() -> None:
    fleet = serving("a", "b", "c")
    fleet.leave("c", 0.1)
    fleet.begin("u5", None, 0.2)
    assert fleet.update.lost == {"c": "it left"}
    assert set(fleet.update.left) == {"a", "b"}
    for name in "ab":
        fleet.voted("u5", name, 1, 0.3)
    [write] = fleet.commit("u5", 0.4)
    written = fleet.written(write.promise, 0.4)
    assert [a.grant.until for a in written if isinstance(a, Ask) and a.member == "c"] == [0.0]
    for name in "ab":
        assert fleet.decided("u5", name, "", 0.5) == [], "c may hand out tokens of version 4"
    ended = stand(fleet, "c", written, 0.6)
    assert [type(action) for action in ended] == [Ended]


def test_a_member_that_leaves_goes_on_with_the_update_that_it_is_in() -> None:
    fleet = serving("a", "b")
    fleet.begin("u5", None, 0.0)
    stand(fleet, "b", asked(fleet, "b", 0.6), 0.6, state="leaving")
    assert stand(fleet, "b", asked(fleet, "b", 1.2), 1.2, state="leaving") == []
    for name in "ab":
        fleet.voted("u5", name, 1, 1.3)
    [write] = fleet.commit("u5", 1.4)
    fleet.written(write.promise, 1.4)
    fleet.decided("u5", "a", "", 1.5)
    [ended] = fleet.decided("u5", "b", "", 1.5)
    assert (ended.committed, ended.lost) == (True, {})


def test_a_member_whose_process_was_replaced_where_it_was_joins_again() -> None:
    fleet = serving("a", "b", "c")
    [action] = asked(fleet, "c", 0.6)
    again = fleet.restarted("c", action.grant, "it is another life", 0.7)
    assert (fleet.serving, [a.grant.epoch for a in again]) == (["a", "b"], [None])
    assert fleet.serves_none("c", 0.7)
    assert fleet.restarted("c", action.grant, "the same, late", 0.7) == []
    joins = stand(fleet, "c", again, 0.8, epoch=1234, version=0)
    assert [type(action) for action in joins] == [Fill]
