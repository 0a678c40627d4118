"""Both ends of an update that fails are told the same reason, whichever transport it came by."""

from __future__ import annotations

import json

import pytest
from engine_ranks import Engine
from trainer import Trainer
from trainer_ranks import TrainerRanks

from rollout.errors import EngineBroken, RolloutError, SourceFailed, TransferFailed

TIMEOUT = 3.0
TRANSPORTS = ("inline", "broadcast", "ipc", "p2p")
FULL = "rank 1 has no room for bucket 2"


@pytest.fixture(scope="module")
def engine(checkpoints):
    engine = Engine(checkpoints[0], 2, checkpoints[1])
    yield engine
    engine.close()


class Link:
    """The engine, with the lease that it opened last."""

    def __init__(self, engine) -> None:
        self._engine, self.lease = engine, None

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def open(self):
        self.lease = self._engine.open()
        return self.lease


@pytest.fixture
def reasons(engine, monkeypatch) -> list[str]:
    """What the engine notes of failed updates."""
    noted: list[str] = []
    monkeypatch.setattr(engine, "record_failed_update", lambda _, reason: noted.append(reason))
    return noted


def errors(engine, transport, weights, prepare=lambda rank, source: source):
    """What every trainer rank is told."""
    if transport == "p2p":
        return TrainerRanks(engine, 2).send(weights, prepare=prepare, timeout=TIMEOUT)
    try:
        source = prepare(0, weights)
        return [Trainer(engine, transport).send(source, timeout=TIMEOUT)]
    except RolloutError as error:
        return [error]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_trainer_is_told_what_failed_on_a_rank(
    engine, checkpoints, monkeypatch, reasons, transport
) -> None:
    rank = engine.ranks[1]
    take = rank.stage_bucket

    def full(args, tensors):
        if json.loads(args["header"])["index"] == 2:
            raise EngineBroken(FULL)
        return take(args, tensors)

    monkeypatch.setattr(rank, "stage_bucket", full)
    got = errors(engine, transport, checkpoints[2])
    assert all(isinstance(error, RolloutError) and FULL in str(error) for error in got), got
    assert len(reasons) == 1
    assert FULL in reasons[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_trainer_is_told_who_aborted_and_why(engine, checkpoints, reasons, transport) -> None:
    why = "aborted by abort_weight_update: the step was lost"
    names, link = list(checkpoints[2]), Link(engine)

    def aborting(rank, source):
        def abort(name):
            if name == names[8] and rank == 0:
                link.lease.abort(why)

        if transport == "p2p":
            source.on_read = abort
            return source
        return ((name, (abort(name), tensor)[1]) for name, tensor in source.items())

    got = errors(link, transport, checkpoints[2], aborting)
    assert all(isinstance(error, TransferFailed) and why in str(error) for error in got), got
    assert reasons == [why]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_engine_is_told_why_the_trainer_gave_up(
    engine, checkpoints, reasons, transport
) -> None:
    last = list(checkpoints[2])[8]

    def failing(rank, source):
        def fail(name):
            if name == last and rank == (1 if transport == "p2p" else 0):
                raise OSError("the disk of the trainer is full")

        if transport == "p2p":
            source.on_read = fail
            return source
        return ((name, (fail(name), tensor)[1]) for name, tensor in source.items())

    got = errors(engine, transport, checkpoints[2], failing)
    assert all(isinstance(error, SourceFailed) for error in got), got
    assert len(reasons) == 1
    assert "the disk of the trainer is full" in reasons[0]
