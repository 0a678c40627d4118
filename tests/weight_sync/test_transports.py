"""Every transport, encoding, tensor parallelism and layout: the same bits, or nothing changes."""

from __future__ import annotations

import os

import pytest
from engine_ranks import Engine, same
from trainer import Trainer, fresh, nudged

from rollout.errors import ChecksumMismatch, RolloutError, SourceFailed
from rollout.testing.faults import Fault, Faulty
from rollout.weight_sync.transports.host import SHARED_MEMORY

TRANSPORTS = ("inline", "broadcast", "ipc")


@pytest.fixture(scope="module", params=["plain", "tiles"])
def layout(request):
    return request.param


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["tp1", "tp2", "tp4"])
def engine(request, checkpoints, layout):
    engine = Engine(checkpoints[0], request.param, checkpoints[1], layout)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def nothing_is_left():
    def found() -> set[str]:
        return {path.name for path in SHARED_MEMORY.glob(f"rollout-ipc-{os.getpid()}-*")}

    before = found()
    yield
    assert found() <= before


@pytest.fixture(params=TRANSPORTS)
def trainer(request, engine):
    return Trainer(engine, request.param)


def test_each_transport_and_encoding_ends_like_a_fresh_start(
    trainer, engine, checkpoints, layout
) -> None:
    new = checkpoints[2]
    first = trainer.send(new, encoding="delta")
    assert first.details["encoding"] == "full"  # nothing was committed by this sender yet
    assert same(engine.live(), fresh(engine, checkpoints, layout, new))

    weights = nudged(new, 0.01)
    changes = trainer.send(weights, encoding="delta")
    assert changes.details["encoding"] == "delta"
    assert changes.transport == trainer.transport
    assert changes.num_bytes == first.num_bytes
    assert changes.wire_bytes <= 0.04 * first.wire_bytes
    assert same(engine.live(), fresh(engine, checkpoints, layout, weights))

    same_again = trainer.send(weights, encoding="delta")  # the shadow held another version
    assert (same_again.wire_bytes, same_again.digest) == (0, changes.digest)
    assert same(engine.live(), fresh(engine, checkpoints, layout, weights))

    dense = nudged(weights, 0.9, seed=1)
    receipt = trainer.send(dense, encoding="delta")
    assert receipt.details["encoding"] == "delta"
    assert receipt.wire_bytes <= first.wire_bytes
    assert same(engine.live(), fresh(engine, checkpoints, layout, dense))

    whole = trainer.send(new, encoding="full")
    assert (whole.details["encoding"], whole.digest) == ("full", first.digest)
    assert trainer.base.nbytes == 0
    assert same(engine.live(), fresh(engine, checkpoints, layout, new))


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_a_flipped_bit_changes_nothing(trainer, engine, checkpoints, encoding) -> None:
    trainer.send(checkpoints[2], encoding=encoding)
    before, version = engine.live(), engine.version
    weights = nudged(checkpoints[2], 0.01)
    fault = Faulty(trainer.transport, Fault("flip", bit=1003))
    with pytest.raises(ChecksumMismatch, match=r"1 of \d+ tensors arrived changed: model\."):
        trainer.send(weights, transport=fault, encoding=encoding)
    assert same(engine.live(), before)
    assert (engine.version, engine.info().state) == (version, "idle")
    assert trainer.base.nbytes == 0  # what the copy held is no longer what is live
    assert trainer.send(weights, encoding=encoding).details["encoding"] == "full"


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_a_source_that_fails_changes_nothing(trainer, engine, checkpoints, encoding) -> None:
    trainer.send(checkpoints[1], encoding=encoding)
    before = engine.live()

    def failing():
        for index, item in enumerate(nudged(checkpoints[1], 0.01).items()):
            if index == 9:
                raise OSError("the disk went away")
            yield item

    with pytest.raises(SourceFailed, match="the disk went away"):
        trainer.send(failing(), encoding=encoding)
    assert same(engine.live(), before)
    assert trainer.send(checkpoints[1], encoding=encoding).details["encoding"] == "full"


@pytest.mark.parametrize("phase", ["bucket", "connect"])
def test_a_fault_of_the_transport_changes_nothing(trainer, engine, checkpoints, phase) -> None:
    before = engine.live()
    fault = Fault("drop") if phase == "bucket" else Fault("delay", phase="connect", seconds=0.2)
    late = {"timeout": 0.7} if phase == "bucket" else {}
    if phase == "bucket":
        with pytest.raises(RolloutError):
            trainer.send(checkpoints[2], transport=Faulty(trainer.transport, fault), **late)
        assert same(engine.live(), before)
    else:
        trainer.send(checkpoints[2], transport=Faulty(trainer.transport, fault))
    assert trainer.send(checkpoints[1]).version == engine.version
