"""What a sender does on a thread beside the gather."""

from __future__ import annotations

import threading
import time

import pytest
from engine_ranks import Engine, same
from trainer import By, Trainer, fresh

from rollout.errors import TransferFailed
from rollout.weight_sync.trainer.bucket_sender import BackgroundWorker
from rollout.weight_sync.transports.inline import InlineSender

LARGE = 128 << 10  # bytes: more than the largest tensor


@pytest.fixture
def worker():
    worker = BackgroundWorker("worker-test")
    yield worker
    worker.close()


def test_tasks_run_in_order_and_are_waited_for(worker) -> None:
    done: list[int] = []
    for i in range(20):
        worker.do(lambda i=i: (time.sleep(0.001), done.append(i)))
    worker.wait()
    assert done == list(range(20))


def test_nothing_runs_after_the_first_error_which_is_raised(worker) -> None:
    done: list[int] = []
    reached = threading.Event()
    worker.do(reached.wait)
    worker.do(lambda: done.append(1 // 0))
    worker.do(lambda: done.append(1))
    reached.set()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            worker.wait()
    with pytest.raises(ZeroDivisionError):
        worker.do(lambda: done.append(2))
    assert done == []


def test_nothing_is_begun_after_it_is_closed() -> None:
    worker, reached, done = BackgroundWorker("worker-test"), threading.Event(), []
    worker.do(reached.wait)
    worker.do(lambda: done.append(1))
    worker.close()
    reached.set()
    with pytest.raises(TransferFailed, match="ended"):
        worker.do(lambda: done.append(2))
    time.sleep(0.05)
    assert done == []


@pytest.fixture(scope="module")
def engine(checkpoints):
    engine = Engine(checkpoints[0], 2, checkpoints[1])
    yield engine
    engine.close()


class Held(InlineSender):
    """Sends its first bucket only once a tensor of a later one has been asked for."""

    def __init__(self, asked: threading.Event) -> None:
        super().__init__()
        self.asked = asked

    def send(self, channel, header, payload) -> None:
        if header.index == 0 and not self.asked.wait(5):
            raise TransferFailed("the gather waits for the transfer")
        super().send(channel, header, payload)


def test_the_next_bucket_is_gathered_while_one_is_sent(engine, checkpoints) -> None:
    asked = threading.Event()

    def items():
        size = 0
        for name, tensor in checkpoints[2].items():
            size += tensor.nbytes
            if size > LARGE + LARGE // 4:  # the first bucket is full, the second is not
                asked.set()
            yield name, tensor

    trainer = Trainer(engine, By(Held(asked)))
    receipt = trainer.send(items(), bucket_bytes=LARGE)
    assert receipt.version == engine.version
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))


class Failing(InlineSender):
    def send(self, channel, header, payload) -> None:
        if header.index == 1:
            raise OSError("the cable was cut")
        super().send(channel, header, payload)


def test_what_fails_beside_the_gather_ends_it(engine, checkpoints) -> None:
    before = engine.live()
    trainer = Trainer(engine, By(Failing()))
    with pytest.raises(TransferFailed, match="cable"):
        trainer.send(checkpoints[2])
    assert same(engine.live(), before)
    assert engine.info().state == "idle"
