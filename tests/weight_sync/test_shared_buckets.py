"""Trainer ranks of the engine's host write one bucket together: the same bits, and no gather."""

from __future__ import annotations

import pytest
from engine_ranks import Engine, same
from exits import nothing_left_in_shared_memory
from test_p2p import broken, receipt_of
from trainer import fresh
from trainer_ranks import TrainerRanks, rows

from rollout.errors import ChecksumMismatch, SourceFailed, TransferFailed
from rollout.testing.faults import Fault, Faulty


@pytest.fixture(scope="module")
def engine(checkpoints):
    engine = Engine(checkpoints[0], 2, checkpoints[1], "plain")
    yield engine
    engine.close()


@pytest.fixture
def trainers(engine):
    with nothing_left_in_shared_memory():
        yield TrainerRanks(engine, 2)


def columns(shape, rank: int, size: int):
    """Shards along the last dimension."""
    return [
        box.__class__((*(0 for _ in shape[1:]), box.starts[0]), (*shape[:-1], box.stops[0]))
        for box in rows(shape[::-1], rank, size)
    ]


@pytest.mark.parametrize(("size", "place"), [(2, rows), (3, rows), (2, columns)])
def test_every_byte_is_written_once_by_who_has_it(engine, checkpoints, size, place) -> None:
    trainers = TrainerRanks(engine, size, place)
    for weights in (checkpoints[2], checkpoints[1]):
        receipt = receipt_of(trainers.send(weights, transport="ipc"))
        assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))
        assert (receipt.transport, receipt.version) == ("ipc", engine.version)
        assert receipt.details["digests"].startswith("each trainer rank's own boxes")
        sent = [int(part) for part in receipt.details["sent_bytes"].split(",")]
        assert len(sent) == size
        padding = 64 * len(weights) * size
        assert receipt.num_bytes <= sum(sent) == receipt.wire_bytes <= receipt.num_bytes + padding
        assert max(sent) <= 1.2 * sum(sent) / size
    assert [plans.num_planned for plans in trainers.plans] == [1] * size


def test_a_flipped_bit_is_refused_by_name(engine, trainers, checkpoints) -> None:
    fault = Faulty("ipc", Fault("flip", bucket=1, bit=1003))
    broken(engine, trainers, checkpoints[2], "model.", ChecksumMismatch, transport=fault)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_whose_source_fails_ends_the_update_on_all(
    engine, trainers, checkpoints, who
) -> None:
    def failing(rank, source):
        def read(name):
            if rank == who and "layers.1." in name:
                raise RuntimeError("the disk is gone")

        source.on_read = read
        return source

    before = engine.live()
    got = trainers.send(checkpoints[2], transport="ipc", prepare=failing)
    assert all(isinstance(one, SourceFailed) and "disk is gone" in str(one) for one in got), got
    assert same(engine.live(), before)
    receipt_of(trainers.send(checkpoints[2], transport="ipc"))


def test_a_rank_that_leaves_frees_the_others(engine, trainers, checkpoints) -> None:
    def leaving(rank, source):
        def read(name):
            if rank == 1 and "layers.1." in name:
                source.agreement.close()

        source.on_read = read
        return source

    got = trainers.send(checkpoints[2], transport="ipc", prepare=leaving)
    assert all(isinstance(one, TransferFailed) for one in got), got
    receipt_of(trainers.send(checkpoints[2], transport="ipc"))
