"""A yes vote under a fence: the update waits for its decision, and for nothing else."""

from __future__ import annotations

import pytest
from engine_ranks import Engine, same
from manual_update import ManualUpdate

from rollout.errors import ConfigError, RolloutError, UpdateInProgress, VersionConflict
from rollout.weight_sync.protocol.messages import Decision


@pytest.fixture(scope="module")
def engine(checkpoints):
    engine = Engine(checkpoints[0], 2, checkpoints[1])
    yield engine
    engine.close()


@pytest.fixture
def weights(engine, checkpoints):
    """Those that are not live."""
    live = engine.live()[0]["model.norm.weight"]
    return checkpoints[1 if (checkpoints[2]["model.norm.weight"] == live).all() else 2]


def prepared(engine, weights, fence: int) -> ManualUpdate:
    update = ManualUpdate(engine, weights)
    update.begin()
    while update.bucket():
        pass
    update.seal(fence=fence)
    return update


def decision(update: ManualUpdate, fence: int | None, *, commit: bool) -> Decision:
    return Decision(update_id=update.request.update_id, commit=commit, fence=fence)


def test_nothing_but_a_decision_ends_it(engine, weights) -> None:
    before, version = engine.live(), engine.version
    update = prepared(engine, weights, 5)
    name = update.request.update_id
    update.channel.abort("its stream broke")
    update.channel.close()
    with pytest.raises(VersionConflict, match="takes a decision alone"):
        update.commit()
    info = engine.info()
    assert (info.state, info.prepared, info.fence) == ("prepared", name, 5)
    with pytest.raises(UpdateInProgress, match="prepared"):
        ManualUpdate(engine, weights, timeout=0.1).begin()
    decide = engine.coordinator.decide
    with pytest.raises(VersionConflict, match=r"fencing epoch 4 is stale: .* has seen 5"):
        decide(decision(update, 4, commit=True))
    with pytest.raises(VersionConflict, match=f"other is not prepared here: {name} is"):
        decide(Decision(update_id="other", commit=True, fence=9))
    assert same(engine.live(), before)
    receipt = decide(decision(update, 6, commit=True))
    assert receipt.version == engine.version == version + 1
    assert not same(engine.live(), before)
    assert decide(decision(update, 6, commit=True)) == receipt  # its answer was lost
    assert update.commit() == receipt
    with pytest.raises(VersionConflict, match=f"live as version {receipt.version}"):
        decide(decision(update, 6, commit=False))
    info = engine.info()
    assert (info.state, info.prepared, info.fence) == ("idle", "", 6)


def test_an_abort_may_be_a_coordinators_or_an_operators(engine, weights) -> None:
    before, version, fence = engine.live(), engine.version, engine.info().fence
    for who, why in ((fence, f"fencing epoch {fence}"), (None, "an operator")):
        update = prepared(engine, weights, fence)
        assert engine.coordinator.decide(decision(update, who, commit=False)) is None
        assert engine.coordinator.decide(decision(update, who, commit=False)) is None
        with pytest.raises(VersionConflict, match=f"without a commit: aborted by {why}"):
            engine.coordinator.decide(decision(update, fence, commit=True))
        assert engine.info().state == "idle"
    assert (engine.version, same(engine.live(), before)) == (version, True)
    with pytest.raises(ConfigError, match="under a fencing epoch"):
        decision(update, None, commit=True)


def test_a_fence_goes_with_the_update_that_an_operator_gives_up(engine, weights) -> None:
    """Or the first front that takes the engine in would be refused, as it begins at 1."""
    before = engine.info().fence
    update = prepared(engine, weights, before + 1000)
    engine.coordinator.decide(decision(update, None, commit=False))
    assert engine.info().fence == before
    engine.coordinator.see_fence(before)


def test_a_fence_that_a_fleet_has_said_stays(engine, weights) -> None:
    before = engine.info().fence
    update = prepared(engine, weights, before + 1)
    engine.coordinator.see_fence(before + 2)
    engine.coordinator.decide(decision(update, None, commit=False))
    assert engine.info().fence == before + 2
    engine.serving.grant(engine.serving.clock() + 60, (1, 1))
    try:
        update = prepared(engine, weights, before + 3)
        engine.coordinator.decide(decision(update, None, commit=False))
        assert engine.info().fence == before + 3
    finally:
        engine.serving.grant(None, (2, 1))


def test_a_vote_under_a_stale_fence_is_none(engine, weights) -> None:
    update = prepared(engine, weights, 18)
    engine.coordinator.decide(decision(update, 18, commit=False))
    with pytest.raises(VersionConflict, match="fencing epoch 17 is stale"):
        prepared(engine, weights, 17)
    assert engine.info().state == "idle"


def test_a_commit_that_fails_is_told_and_leaves_nothing_prepared(engine, weights) -> None:
    before, version = engine.live(), engine.version
    update = prepared(engine, weights, 19)
    engine.ranks[1].fail_commit = True
    try:
        with pytest.raises((RuntimeError, RolloutError), match="made to fail"):
            engine.coordinator.decide(decision(update, 19, commit=True))
    finally:
        engine.ranks[1].fail_commit = False
    assert (engine.info().state, engine.version) == ("idle", version)
    assert same(engine.live(), before)
    with pytest.raises(VersionConflict, match="without a commit"):
        engine.coordinator.decide(decision(update, 19, commit=True))


def test_without_staging_nothing_can_be_prepared(engine, weights) -> None:
    update = ManualUpdate(engine, weights, staging="none")
    update.begin()
    with pytest.raises(VersionConflict, match="holds generation"):
        update.seal(fence=19)
    update.channel.close()
    full = ManualUpdate(engine, weights)  # mends what an update without staging has left
    full.send_all()
    assert full.commit().version == engine.version
