"""Every kind of fault at every phase: a named error in time, the old bits, the next one takes."""

from __future__ import annotations

import subprocess
import threading
import time

import pytest
from engine_ranks import Engine, same
from trainer import BUCKET, Trainer
from trainer_ranks import Boxes, TrainerRanks, agreements, rows

from rollout.errors import (
    ChecksumMismatch,
    ConfigError,
    DeadlineExceeded,
    IncompleteUpdate,
    RolloutError,
    TransferFailed,
    UpdateInProgress,
    VersionConflict,
    WeightMismatch,
)
from rollout.testing.faults import (
    KINDS,
    Fault,
    Faulty,
    FaultyLink,
)
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.transports.links import Links

TIMEOUT = 1.0
GONE = (TransferFailed, IncompleteUpdate, DeadlineExceeded)

# What the sender is told; None: nothing is wrong with the update.
BROKEN = {
    Fault("flip", bucket=2, bit=77): (ChecksumMismatch, r"1 of \d+ tensors arrived changed"),
    Fault("drop", bucket=2): (GONE, "bucket"),
    Fault("duplicate", bucket=2): None,  # one that brings its bytes is known by its header
    Fault("reorder", bucket=2): (TransferFailed, "bucket 3 came where 2 was due"),
    Fault("truncate", bucket=2): (
        (TransferFailed, ChecksumMismatch),
        "carried|arrived changed|was announced",
    ),
    Fault("dtype", bucket=2): (WeightMismatch, "model\\..*int32"),
    Fault("shape", bucket=2): (WeightMismatch, "model\\..*shape"),
    Fault("cut", bucket=2): (TransferFailed, "closed its channel, while its tensors came"),
    Fault("cut", phase="connect"): (TransferFailed, "closed its channel, while its tensors came"),
    Fault("cut", phase="seal"): (TransferFailed, "closed its channel, while its tensors came"),
    Fault("delay", bucket=2, seconds=0.2): None,
    Fault("delay", phase="connect", seconds=0.2): None,
    Fault("delay", phase="seal", seconds=0.2): None,
    Fault("stall", phase="seal"): None,
}
ON_CHANNEL = {
    Fault("flip", phase="seal", bit=5): (ChecksumMismatch, "arrived changed"),
    Fault("drop", phase="seal"): (VersionConflict, "commit before seal"),
    Fault("duplicate", phase="seal"): None,
    Fault("cut", phase="seal"): (TransferFailed, "closed its channel, while its tensors came"),
    Fault("cut", phase="commit"): (TransferFailed, "closed its channel, between the ranks' votes"),
    Fault("delay", phase="commit", seconds=0.2): None,
    Fault("drop", phase="commit"): None,  # the engine says that it is live
    Fault("duplicate", phase="commit"): None,
}


@pytest.fixture(scope="module")
def engine(checkpoints):
    engine = Engine(checkpoints[0], 2, checkpoints[1])
    yield engine
    engine.close()


@pytest.fixture(params=["inline", "broadcast"])
def trainer(request, engine):
    return Trainer(engine, request.param)


def name_of(fault: Fault) -> str:
    return f"{fault.kind}-{fault.phase}"


def expect(trainer, weights, expected, **options) -> None:
    """One faulty update on top of version v, then a good one."""
    engine = trainer.engine
    before, version = engine.live(), engine.version
    started = time.monotonic()
    if expected is None:
        receipt = trainer.send(weights, timeout=TIMEOUT, **options)
        assert (receipt.version, engine.version) == (version + 1, version + 1)
        assert not same(engine.live(), before)
    else:
        with pytest.raises(expected[0], match=expected[1]):
            trainer.send(weights, timeout=TIMEOUT, **options)
        assert engine.version == version
        assert same(engine.live(), before)
    assert time.monotonic() - started < 3 * TIMEOUT
    assert engine.info().state == "idle"


@pytest.mark.parametrize("fault", BROKEN, ids=name_of)
def test_a_fault_of_the_transport(trainer, engine, checkpoints, fault) -> None:
    trainer.send(checkpoints[1])
    expected = BROKEN[fault]
    if fault.kind == "duplicate" and trainer.transport == "broadcast":
        expected = (TransferFailed, "bucket 2 came where 3 was due")
    expect(trainer, checkpoints[2], expected, transport=Faulty(trainer.transport, fault))
    good = trainer.send(checkpoints[2])
    assert good.version == engine.version
    assert good.digest == sum(engine.digests(TIMEOUT).values()) % 2**64


def test_a_broken_link_is_told_as_what_broke_it(engine, checkpoints, monkeypatch) -> None:
    """Whichever socket closes first: here the sender's own, before it hears of anything."""
    connect = Links.connect

    def closed_by_peer(self, timeout):
        if self._rank == 0:
            raise TransferFailed("connection closed by peer")
        return connect(self, timeout)

    monkeypatch.setattr(Links, "connect", closed_by_peer)
    cut = Faulty("broadcast", Fault("cut", phase="connect"))
    with pytest.raises(TransferFailed, match="closed its channel"):
        Trainer(engine, "broadcast").send(checkpoints[1], transport=cut, timeout=TIMEOUT)


@pytest.mark.parametrize("fault", ON_CHANNEL, ids=name_of)
def test_a_fault_of_the_channel(trainer, engine, checkpoints, fault) -> None:
    trainer.send(checkpoints[1])
    expect(trainer, checkpoints[2], ON_CHANNEL[fault], link=FaultyLink(engine, fault))
    assert trainer.send(checkpoints[2]).version == engine.version


def test_a_sender_that_stalls_keeps_nobody_longer_than_the_deadline(trainer, engine, checkpoints):
    trainer.send(checkpoints[1])
    before, version = engine.live(), engine.version
    stalled = Faulty(trainer.transport, Fault("stall", bucket=2))
    if trainer.transport == "broadcast":  # announced bytes are waited for
        with pytest.raises(DeadlineExceeded, match=r"bucket 2 was announced but did not arrive"):
            trainer.send(checkpoints[2], transport=stalled, timeout=TIMEOUT)
        assert same(engine.live(), before)
        assert engine.version == version
    else:  # nobody waits for the sender but the next one
        began = []

        class Slow:
            def __iter__(self):
                for index, item in enumerate(checkpoints[2].items()):
                    if index == 4:
                        with pytest.raises(UpdateInProgress):
                            Trainer(engine, "inline").send(checkpoints[1], timeout=0.3)
                        began.append(index)
                    yield item

        trainer.send(iter(Slow()), timeout=TIMEOUT)
        assert began == [4]
        trainer.send(checkpoints[1], transport=stalled, timeout=1.5)
    assert trainer.send(checkpoints[2]).version == engine.version


def test_a_stopped_process_goes_on_and_a_killed_one_does_not(trainer, checkpoints) -> None:
    """Ranks are threads here; the end-to-end tests kill and stop real ones."""
    child = subprocess.Popen(["sleep", "300"])
    try:
        stop = Fault("stall", bucket=1, pid=child.pid, seconds=1.5)
        trainer.send(checkpoints[2], transport=Faulty(trainer.transport, stop))
        assert state_of(child.pid) == "T"
        deadline = time.monotonic() + 30
        while state_of(child.pid) == "T":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        kill = Fault("kill", phase="connect", pid=child.pid)
        trainer.send(checkpoints[1], transport=Faulty(trainer.transport, kill))
        assert child.wait(30) == -9
    finally:
        child.kill()
        child.wait()


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0]


# What does not show in the bytes of a bucket.
UNSEEN = ("kill", "stall", "delay", "fill", "exhaust", "swap")


@pytest.mark.parametrize("encoding", ["full", "delta"])
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in UNSEEN])
def test_shared_memory_and_deltas_too(engine, checkpoints, kind, encoding) -> None:
    trainer = Trainer(engine, "ipc")
    trainer.send(checkpoints[1], encoding=encoding)
    before, version = engine.live(), engine.version
    fault = Faulty("ipc", Fault(kind, bucket=0, bit=9))
    with pytest.raises(RolloutError):
        trainer.send(checkpoints[2], transport=fault, encoding=encoding, timeout=TIMEOUT)
    assert same(engine.live(), before)
    assert (engine.version, engine.info().state) == (version, "idle")
    assert trainer.send(checkpoints[2]).version == version + 1


def test_what_a_wrapper_does_not_see_is_refused() -> None:
    for wrong in (
        lambda: Fault("drop", phase="connect"),
        lambda: Fault("melt"),
        lambda: Fault("flip", phase="never"),
        lambda: Faulty("inline", Fault("cut", phase="commit")),
        lambda: Faulty("inline", Fault("flip", phase="seal")),
        lambda: FaultyLink(None, Fault("flip")),
    ):
        with pytest.raises(ConfigError):
            wrong()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault("flip", bucket=3), r"the flip at bucket 3 never happened: .* buckets 0 to 0"),
        (Fault("reorder", bucket=0), r"the reorder at bucket 0 never happened"),
        (Fault("swap", phase="gather", bucket=999), r"gather 999 never .* tensors 0 to 2\d"),
    ],
    ids=["flip", "reorder", "swap"],
)
def test_a_fault_that_never_happened_is_an_error(trainer, engine, checkpoints, fault, text) -> None:
    trainer.send(checkpoints[1])
    before, version = engine.live(), engine.version
    faults = Faulty(trainer.transport, Fault("delay", bucket=0), fault)
    with pytest.raises(ConfigError, match=text):
        trainer.send(checkpoints[2], transport=faults, bucket_bytes=64 << 20)
    assert same(engine.live(), before)
    assert (engine.version, engine.info().state) == (version, "idle")


class Gathered(Boxes):
    """Holds rows on each rank, and can be gathered."""

    def __iter__(self):
        yield from self._weights.items()


@pytest.mark.parametrize("kind", ["inline", "broadcast", "ipc"])
def test_a_gather_gone_wrong_is_refused_and_not_proven_equal(engine, checkpoints, kind) -> None:
    """Each rank digests its own rows: two elements in the wrong place do not go live."""
    Trainer(engine, kind).send(checkpoints[1])
    before, version = engine.live(), engine.version
    trainers = TrainerRanks(engine, 3, place=rows)

    def send(weights, *faults):
        transport = Faulty(kind, *faults) if faults else kind
        got = [None] * 3

        def run(rank, agreement) -> None:
            options = UpdateOptions(transport=transport, bucket_bytes=BUCKET, timeout=10.0)
            try:
                got[rank] = publish(
                    Gathered(weights, agreement), connect=lambda: engine,
                    options=options, plans=trainers.plans[rank],
                )  # fmt: skip
            except RolloutError as error:
                got[rank] = error

        threads = [
            threading.Thread(target=run, args=(rank, link))
            for rank, link in enumerate(agreements(3))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return got

    names = list(checkpoints[2])
    wrong = send(checkpoints[2], Fault("swap", phase="gather", bucket=4))
    assert all(isinstance(error, ChecksumMismatch) for error in wrong), wrong
    assert f"1 of {len(names)} tensors arrived changed: {names[4]}" in str(wrong[0])
    assert same(engine.live(), before)
    assert engine.version == version
    good = send(checkpoints[2])
    assert [receipt.version for receipt in good] == [version + 1] * 3, good
    assert good[0].details["digests"].startswith("each trainer rank's own boxes")
    assert good[0].digest == sum(engine.digests(TIMEOUT).values()) % 2**64


def test_the_receipt_says_that_one_ranks_digests_are_of_what_was_packed(engine, checkpoints):
    receipt = Trainer(engine, "inline").send(checkpoints[1])
    assert receipt.details["digests"] == "the tensors as the sender packed them"
