"""A channel may close at any moment, from another thread: nothing is torn, nothing stays taken."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_ranks import same
from manual_update import ManualUpdate

from rollout.errors import DeadlineExceeded, TransferFailed, UpdateInProgress, VersionConflict
from rollout.weight_sync.protocol.messages import Decision


@pytest.fixture
def in_thread():
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


class Gate:
    """Holds one method of a rank until it is opened."""

    def __init__(self, rank, method: str) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        inner = getattr(rank, method)

        def held(args, tensors):
            self.entered.set()
            assert self.opened.wait(30)
            return inner(args, tensors)

        setattr(rank, method, held)


def next_one_takes(engine, weights) -> None:
    update = ManualUpdate(engine, weights)
    update.send_all()
    assert update.commit().version == engine.version
    assert engine.info().state == "idle"


def test_closed_while_the_ranks_vote(engine, checkpoints, in_thread) -> None:
    before = engine.live()
    gate = Gate(engine.ranks[1], "stage_seal")
    update = ManualUpdate(engine, checkpoints[2])
    sealing = in_thread(update.send_all)
    assert gate.entered.wait(30)
    update.channel.close()
    gate.opened.set()
    with pytest.raises(TransferFailed, match="ended before"):
        sealing.result(30)
    assert engine.info().state == "idle"
    assert same(engine.live(), before)
    next_one_takes(engine, checkpoints[2])


def test_closed_while_it_waits_for_another(engine, checkpoints, in_thread) -> None:
    first = ManualUpdate(engine, checkpoints[2])
    second = ManualUpdate(engine, checkpoints[2], timeout=30.0)
    first.begin()
    waiting = in_thread(second.begin)
    time.sleep(0.2)
    second.channel.close()
    with pytest.raises(TransferFailed, match="ended before its begin"):
        waiting.result(10)  # while the other is open
    assert engine.info().state == "staging"
    first.channel.close()
    assert engine.info().state == "idle"
    next_one_takes(engine, checkpoints[2])


def test_closed_while_it_begins(engine, checkpoints, in_thread) -> None:
    gate = Gate(engine.ranks[0], "stage_begin")
    update = ManualUpdate(engine, checkpoints[2])
    beginning = in_thread(update.begin)
    assert gate.entered.wait(30)
    update.channel.close()
    with pytest.raises(UpdateInProgress):  # not before the ranks are done with the first
        ManualUpdate(engine, checkpoints[2], timeout=0.1).begin()
    gate.opened.set()
    with pytest.raises(TransferFailed, match="ended before its begin"):
        beginning.result(30)
    assert engine.ended == [True]
    next_one_takes(engine, checkpoints[2])


def test_closed_while_it_commits(engine, checkpoints, in_thread) -> None:
    update = ManualUpdate(engine, checkpoints[2])
    update.send_all()
    gate = Gate(engine.ranks[1], "commit")
    committing = in_thread(update.commit)
    assert gate.entered.wait(30)
    update.channel.close()
    with pytest.raises(UpdateInProgress, match="committing"):
        ManualUpdate(engine, checkpoints[1], timeout=0.1).begin()
    gate.opened.set()
    assert committing.result(30).version == engine.version == 1
    assert engine.info().state == "idle"
    next_one_takes(engine, checkpoints[1])


def test_a_commit_that_is_late_on_one_rank_is_taken_back_on_all(engine, checkpoints) -> None:
    before = engine.live()
    update = ManualUpdate(engine, checkpoints[2], timeout=1.5)
    update.send_all()
    gate = Gate(engine.ranks[1], "commit")
    threading.Timer(2.0, gate.opened.set).start()
    with pytest.raises(DeadlineExceeded, match=r"rank 1 did not answer .*commit"):
        update.commit()
    assert (engine.version, engine.broken) == (0, None)
    assert same(engine.live(), before)
    next_one_takes(engine, checkpoints[2])


def test_a_refused_update_leaves_a_broken_engine_broken(engine, checkpoints) -> None:
    update = ManualUpdate(engine, checkpoints[2], staging="none")
    update.begin()
    update.bucket()
    update.channel.close()
    assert engine.info().state == "broken"
    with pytest.raises(VersionConflict):
        ManualUpdate(engine, checkpoints[2], version=0).begin()
    with pytest.raises(VersionConflict):
        engine.rollback(1.0)
    assert engine.info().state == "broken"
    next_one_takes(engine, checkpoints[2])
    assert engine.broken is None


@pytest.mark.parametrize(("is_served", "level"), [(True, "WARNING"), (False, "INFO")])
def test_an_update_that_fails_is_a_warning_where_others_are_served(
    engine, checkpoints, caplog, monkeypatch, is_served, level
) -> None:
    monkeypatch.setattr(engine.coordinator.engine.counters, "is_served", is_served)
    caplog.set_level("INFO", "rollout")  # whatever a command line in this process has set
    failed, refused = ManualUpdate(engine, checkpoints[2]), ManualUpdate(engine, checkpoints[2])
    failed.begin()
    failed.channel.abort("the trainer gave it up")
    with pytest.raises(VersionConflict):
        ManualUpdate(engine, checkpoints[2], update_id="old", version=0).begin()
    refused.channel.abort("a name is unknown")
    broken = ManualUpdate(engine, checkpoints[2], staging="none", update_id="in-place")
    broken.begin()
    broken.bucket()
    broken.channel.abort("the trainer died")
    told = [r for r in caplog.records if " serves" in r.getMessage()]
    assert {record.levelname for record in told} == {level}
    given_up, stale, unnamed, in_place = (record.getMessage() for record in told)
    name = failed.request.update_id
    assert given_up == f"update {name} failed, version 0 serves on: the trainer gave it up"
    assert stale.startswith("update old was refused, version 0 serves on: version 0 is not above")
    assert unnamed == "an update was refused, version 0 serves on: a name is unknown"
    assert in_place == "update in-place failed, nothing serves: the trainer died"


def test_a_reason_is_kept_and_logged_in_short(engine, checkpoints, caplog) -> None:
    update = ManualUpdate(engine, checkpoints[2])
    update.begin()
    update.channel.abort("the disk is full" + "!" * (1 << 20))
    kept = engine.coordinator.ended.known(update.request.update_id)
    assert kept.reason.startswith("the disk is full!")
    assert len(kept.reason) == 1024
    assert len(caplog.messages[-1]) < 1200
    long = Decision(update_id="u", commit=False, fence=None, reason="!" * (1 << 20))
    assert len(long.reason) == 1024


def test_an_update_without_staging_that_never_began_breaks_nothing(engine, checkpoints) -> None:
    def late(timeout: float) -> None:
        raise DeadlineExceeded("no step boundary came")

    engine.hold = late
    with pytest.raises(DeadlineExceeded):
        ManualUpdate(engine, checkpoints[2], staging="none").begin()
    assert engine.info().state == "idle"
    assert engine.broken is None
