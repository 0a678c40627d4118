"""Boxes straight from trainer ranks to engine ranks: the same bits, no byte too many, no gather."""

from __future__ import annotations

import json
import socket
import time

import pytest
from engine_ranks import Engine, same
from trainer import fresh
from trainer_ranks import Boxes, TrainerRanks, drifted, rows, wanted_bytes, whole

from rollout.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    RolloutError,
    SourceFailed,
    TransferFailed,
)
from rollout.testing.faults import Fault, Faulty
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weights import Box


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["tp1", "tp2", "tp4"])
def engine(request, checkpoints):
    engine = Engine(checkpoints[0], request.param, checkpoints[1], "plain")
    yield engine
    engine.close()


def replicas(shape, rank: int, size: int) -> list[Box]:
    """Hybrid sharding: two groups of ranks, each holding everything."""
    return rows(shape, rank // 2, size // 2)


def receipt_of(got):
    for one in got:
        if isinstance(one, BaseException):
            raise one
    assert all(one.digest == got[0].digest for one in got)
    return got[0]


@pytest.mark.parametrize(
    ("size", "place"), [(1, rows), (2, rows), (3, rows), (2, whole), (4, replicas)],
    ids=["1", "2", "3", "ddp", "hsdp"],
)  # fmt: skip
def test_it_ends_like_a_fresh_start_with_the_least_bytes(engine, checkpoints, size, place) -> None:
    trainers = TrainerRanks(engine, size, place)
    for weights in (checkpoints[2], checkpoints[1]):
        receipt = receipt_of(trainers.send(weights))
        assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))
        assert (receipt.transport, receipt.version) == ("p2p", engine.version)
        assert receipt.num_bytes == sum(t.nbytes for t in weights.values())
        least = wanted_bytes(engine)
        assert least <= receipt.wire_bytes <= 1.01 * least
        sent = [int(part) for part in receipt.details["sent_bytes"].split(",")]
        assert len(sent) == size
        assert max(sent) <= 1.2 * sum(sent) / size
    assert [plans.num_planned for plans in trainers.plans] == [1] * size


@pytest.fixture
def trainers(engine):
    return TrainerRanks(engine, 2)


def test_every_rank_digests_its_own_boxes(engine, trainers, checkpoints) -> None:
    receipt = receipt_of(trainers.send(checkpoints[2]))
    assert sum(engine.digests(5.0).values()) % 2**64 == receipt.digest


def test_rounds_are_bounded(engine, trainers, checkpoints) -> None:
    seen = []
    call = engine.call

    def counting(method, args, tensors=None):
        if method == "stage_bucket":
            seen.append(json.loads(args["header"]))
        return call(method, args, tensors)

    engine.call = counting
    try:
        receipt_of(trainers.send(checkpoints[2], bucket_bytes=8 << 10))
    finally:
        del engine.call
    assert len(seen) >= 8
    for header in seen:
        for end in ("src", "dst"):  # of every message: who sends, who receives
            by_rank: dict[int, int] = {}
            for message in header["messages"]:
                size = message["stop"] - message["start"]
                by_rank[message[end]] = by_rank.get(message[end], 0) + size
            assert max(by_rank.values()) <= 8 << 10


def test_a_tensor_is_read_once_however_many_ranks_take_of_it(engine, trainers, checkpoints) -> None:
    reads: dict[tuple[int, str], int] = {}

    def counting(rank, source):
        def read(name):
            reads[rank, name] = reads.get((rank, name), 0) + 1

        source.on_read = read
        return source

    receipt_of(trainers.send(checkpoints[2], bucket_bytes=8 << 20, prepare=counting))  # one round
    assert set(reads.values()) == {1}
    assert {name for _, name in reads} == set(checkpoints[2])


def broken(engine, trainers, weights, match, error=RolloutError, **options):
    """All ranks raise one error, in time; the old version serves; the next update takes."""
    before, version = engine.live(), engine.version
    started = time.monotonic()
    got = trainers.send(weights, **options)
    assert time.monotonic() - started < 25
    for one in got:
        assert isinstance(one, error), got
        assert type(one) is type(got[0])
    assert match in str(got[0])
    assert same(engine.live(), before)
    assert (engine.version, engine.info().state) == (version, "idle")
    assert receipt_of(trainers.send(weights)).version == version + 1


def test_a_flipped_bit_is_refused_by_name(engine, trainers, checkpoints) -> None:
    fault = Faulty("p2p", Fault("flip", bucket=1, bit=1003))
    broken(engine, trainers, checkpoints[2], "model.", ChecksumMismatch,
           transport=fault)  # fmt: skip


def test_a_lost_round_is_a_named_error_in_time(engine, trainers, checkpoints) -> None:
    fault = Faulty("p2p", Fault("drop", bucket=1))
    broken(engine, trainers, checkpoints[2], "bucket 1", (DeadlineExceeded, TransferFailed),
           transport=fault, timeout=1.0)  # fmt: skip


@pytest.mark.parametrize("who", [0, 1])
def test_a_source_that_fails_on_one_rank_fails_on_all(engine, trainers, checkpoints, who) -> None:
    def failing(rank, source):
        def read(name):
            if rank == who and "layers.1" in name:
                raise OSError("the disk went away")

        source.on_read = read
        return source

    broken(engine, trainers, checkpoints[2], "the disk went away", SourceFailed, prepare=failing)


@pytest.mark.parametrize("who", [0, 1])
def test_a_trainer_rank_that_leaves_frees_everybody(engine, trainers, checkpoints, who) -> None:
    def leaving(rank, source):
        def read(name):
            if rank == who and "layers.1" in name:
                for link in source.agreement._star.links.values():
                    link.shutdown(socket.SHUT_RDWR)  # what the kernel does for a dead process

        source.on_read = read
        return source

    broken(engine, trainers, checkpoints[2], "is gone", TransferFailed, prepare=leaving)


def test_an_engine_rank_that_fails_frees_everybody(engine, trainers, checkpoints) -> None:
    rank, rounds = engine.ranks[-1], []

    def dying(args, tensors):
        rounds.append(args)
        if len(rounds) == 2:
            raise TransferFailed("this rank was made to fail")
        return rank.updates.bucket(args, tensors)

    rank.stage_bucket = dying
    try:
        before = engine.live()
        started = time.monotonic()
        got = trainers.send(checkpoints[2])
        assert time.monotonic() - started < 25
        assert all(isinstance(one, TransferFailed) for one in got), got
        assert same(engine.live(), before)
    finally:
        del rank.stage_bucket
    receipt_of(trainers.send(checkpoints[2]))


def test_replicas_that_differ_are_refused(engine, checkpoints) -> None:
    trainers = TrainerRanks(engine, 2, whole)
    broken(engine, trainers, checkpoints[2], "model.norm.weight (ranks 0 and 1)", ChecksumMismatch,
           prepare=drifted)  # fmt: skip


def test_boxes_that_are_not_known_fall_back_and_say_so(engine, trainers, checkpoints) -> None:
    class Gathering(Boxes):
        def __iter__(self):
            yield from self._weights.items()

    def partial(shape, rank, size):
        return rows(shape, rank, size) if shape[0] != 64 else []

    def unknown(rank, source):
        return Gathering(source._weights, source.agreement, partial)

    receipt = receipt_of(trainers.send(checkpoints[2], prepare=unknown))
    assert receipt.transport == "ipc"
    assert receipt.details["transport_reason"].startswith("no p2p: no trainer rank holds")
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))


def test_auto_takes_it_where_the_weights_are_split(engine, trainers, checkpoints) -> None:
    receipt = receipt_of(trainers.send(checkpoints[2], transport="auto"))
    assert receipt.transport == "p2p"
    assert "split among trainer ranks" in receipt.details["transport_reason"]


def test_masters_are_cast_before_they_are_sent_and_digested(engine, checkpoints) -> None:
    masters = {name: tensor.double() * (1 + 1e-9) for name, tensor in checkpoints[2].items()}
    options = UpdateOptions(transport="p2p", bucket_bytes=32 << 10, timeout=5.0)
    receipt = publish(masters, connect=lambda: engine, options=options)
    assert receipt.transport == "p2p"
    assert receipt.num_bytes == sum(t.numel() * 4 for t in masters.values())
    cast = {name: tensor.float() for name, tensor in masters.items()}
    assert same(engine.live(), fresh(engine, checkpoints, "plain", cast))
