"""Whatever a sender repeats is answered as the first time; an id has one outcome."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_ranks import Engine, same
from manual_update import ManualUpdate

from rollout.engine.updates.lease import Lease
from rollout.errors import VersionConflict


@pytest.fixture(scope="module")
def engine(checkpoints):
    engine = Engine(checkpoints[0], 2, checkpoints[1])
    yield engine
    engine.close()


@pytest.fixture
def weights(engine, checkpoints):
    """Those that are not live."""
    return checkpoints[2] if engine.version % 2 == 0 else checkpoints[1]


def test_every_step_may_come_twice_and_counts_once(engine, weights) -> None:
    before = engine.version
    update = ManualUpdate(engine, weights)
    assert update.begin() == update.begin()
    for header, payload in update.buckets:
        for _ in range(2):
            update.channel.bucket(header, payload)
            update.channel.wait(header.index, 5.0)
    update.sent = len(update.buckets)
    update.seal()
    update.seal()
    assert update.commit() is update.commit()
    assert engine.version == before + 1
    update.channel.close()
    assert update.commit().version == engine.version  # also once it has ended


def test_a_committed_update_that_is_sent_again_is_answered_and_changes_nothing(
    engine, weights
) -> None:
    first = ManualUpdate(engine, weights)
    first.send_all()
    receipt, live = first.commit(), engine.live()
    between = ManualUpdate(engine, weights)  # somebody else's update is open meanwhile
    between.begin()
    again = ManualUpdate(engine, weights, update_id=first.request.update_id)
    again.send_all()
    assert again.commit() == receipt
    again.channel.close()
    assert engine.info().state == "staging"
    between.channel.close()
    assert engine.version == receipt.version
    assert same(engine.live(), live)


def test_an_update_that_waits_for_itself_to_commit_is_answered_and_commits_nothing(
    engine, weights
) -> None:
    first = ManualUpdate(engine, weights)
    first.send_all()
    again = ManualUpdate(engine, weights, update_id=first.request.update_id)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(again.send_all)
        time.sleep(0.1)  # it waits for the lease that ``first`` holds
        assert not waiting.done()
        receipt = first.commit()
        waiting.result(30)
    assert again.commit() == receipt
    assert engine.version == receipt.version
    assert engine.info().state == "idle"  # the lease is free for others


def test_other_weights_under_the_id_of_a_committed_update_are_refused(
    engine, weights, checkpoints
) -> None:
    first = ManualUpdate(engine, weights)
    first.send_all()
    receipt = first.commit()
    other = checkpoints[1] if weights is checkpoints[2] else checkpoints[2]
    again = ManualUpdate(engine, other, update_id=first.request.update_id)
    with pytest.raises(VersionConflict, match=f"live as version {receipt.version} with other"):
        again.send_all()
    assert engine.version == receipt.version


def test_another_transport_cannot_send_a_committed_update_again(engine, weights) -> None:
    first = ManualUpdate(engine, weights)
    first.send_all()
    version = first.commit().version
    again = ManualUpdate(engine, weights, update_id=first.request.update_id, transport="foreign")
    again.channel = Lease(engine.coordinator, ("foreign",))
    with pytest.raises(VersionConflict, match=f"committed here already, as version {version}:"):
        again.begin()


def test_a_commit_after_a_failed_update_is_refused_with_the_reason(engine, weights) -> None:
    before = engine.version
    update = ManualUpdate(engine, weights)
    update.send_all()
    update.channel.abort("the learner found a NaN")
    with pytest.raises(Exception, match="found a NaN"):
        update.commit()
    again = ManualUpdate(engine, weights, update_id=update.request.update_id)
    with pytest.raises(VersionConflict, match=r"without a commit: the learner found a NaN; .*own"):
        again.begin()
    assert engine.version == before
    assert engine.info().state == "idle"


def test_what_was_refused_before_it_began_may_be_tried_again_under_its_id(engine, weights) -> None:
    holder, waiting = ManualUpdate(engine, weights), ManualUpdate(engine, weights, timeout=0.1)
    holder.begin()
    with pytest.raises(Exception, match="did not end within"):
        waiting.begin()
    holder.channel.close()
    again = ManualUpdate(engine, weights, update_id=waiting.request.update_id)
    again.send_all()
    assert again.commit().version == engine.version
