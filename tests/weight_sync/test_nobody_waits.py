"""A rank that hangs, or fails where the others cannot see it, keeps the engine from nobody."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from engine_ranks import Engine
from trainer import Trainer
from trainer_ranks import Boxes, TrainerRanks, agreements

from rollout.errors import DeadlineExceeded, RolloutError, SourceFailed
from rollout.weight_sync.protocol.committed import DeltaBase
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.trainer.weight_report import check_weights
from rollout.weight_sync.versions.store import LocalStore
from rollout.weight_sync.versions.writer import VersionWriter
from rollout.weights import TensorMeta

TIMEOUT = 1.0
LONG = 60.0  # for hangs of the test itself


@pytest.fixture(scope="module")
def engine(checkpoints):
    engine = Engine(checkpoints[0], 2, checkpoints[1])
    yield engine
    engine.close()


class ConcurrentCalls:
    """Calls of several trainer ranks, each in a thread; ``got`` is what each returned or raised."""

    def __init__(self, calls) -> None:
        self.got: list = [None] * len(calls)
        self.threads = [
            threading.Thread(target=self._run, args=(i, call)) for i, call in enumerate(calls)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, index, call) -> None:
        try:
            self.got[index] = call()
        except BaseException as error:
            self.got[index] = error

    def join(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.threads)):
            self.threads[rank].join(LONG)
            assert not self.threads[rank].is_alive()


class Whole(Boxes):
    """Can be gathered, too."""

    def __iter__(self):
        yield from self._weights.items()


class Hanging(Boxes):
    """One rank stays in its fourth read until it is let go."""

    def __init__(self, weights, agreement, rank: int, leave: threading.Event) -> None:
        super().__init__(weights, agreement)
        self._reads, self._leave, self._mine = 0, leave, agreement.rank == rank

    def local_values(self, name):
        self._reads += 1
        if self._mine and self._reads == 4:
            assert self._leave.wait(LONG)
        return super().local_values(name)


class Gathering:
    """A source whose ranks meet at a barrier for each tensor; one may fail before it, or hang."""

    def __init__(self, weights, agreement, meet, fails: int = -1, hangs=None) -> None:
        self.agreement, self._weights, self._meet = agreement, weights, meet
        self._fails, self._hangs = agreement.rank == fails, hangs

    def metadata(self):
        return tuple(TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in self._weights.items())

    def __iter__(self):
        for index, (name, tensor) in enumerate(self._weights.items()):
            if index == 4 and self._fails:
                raise KeyError("no such shard")
            if index == 4 and self._hangs is not None:
                assert self._hangs.wait(LONG)
            self._meet.wait(LONG)
            yield name, tensor if self.agreement.is_sender else torch.empty_like(tensor)

    def local_boxes(self):
        return []


def options(**changes):
    return UpdateOptions(**{"bucket_bytes": 32 << 10, "timeout": TIMEOUT, **changes})


def free_again(engine, weights) -> None:
    """Somebody else's update takes, well before anything of the first one is let go."""
    started = time.monotonic()
    receipt = Trainer(engine, "inline").send(weights, timeout=LONG / 2)
    assert receipt.version == engine.version
    assert time.monotonic() - started < LONG / 2


@pytest.mark.parametrize("hangs", [0, 1])
@pytest.mark.parametrize("transport", ["p2p", "delta"])
def test_a_rank_that_hangs_in_its_own_boxes(engine, checkpoints, transport, hangs) -> None:
    trainers, leave = TrainerRanks(engine, 2), threading.Event()
    links = agreements(2)
    how = (
        {"transport": "p2p"} if transport == "p2p" else {"transport": "inline", "encoding": "delta"}
    )
    bases = [None, None]
    if transport == "delta":
        bases = [DeltaBase(), DeltaBase()]
        first = agreements(2)
        running = ConcurrentCalls([
            lambda r=r: publish(
                Whole(checkpoints[1], first[r]), connect=lambda: engine,
                options=options(**how, timeout=LONG), base=bases[r], plans=trainers.plans[r],
            )
            for r in range(2)
        ])  # fmt: skip
        running.join()
        assert all(hasattr(got, "version") for got in running.got), running.got
    running = ConcurrentCalls([
        lambda r=r: publish(
            Hanging(checkpoints[2], links[r], hangs, leave), connect=lambda: engine,
            options=options(**how), base=bases[r], plans=trainers.plans[r],
        )
        for r in range(2)
    ])  # fmt: skip
    running.join(1 - hangs)
    failed = running.got[1 - hangs]
    assert isinstance(failed, DeadlineExceeded), failed
    assert f"trainer rank {hangs} did not yield within {TIMEOUT:g} s" in str(failed)
    free_again(engine, checkpoints[1])
    leave.set()
    running.join()
    assert isinstance(running.got[hangs], DeadlineExceeded), running.got[hangs]


@pytest.mark.parametrize("transport", ["inline", "broadcast"])
def test_a_rank_that_raises_before_a_gather_frees_the_engine_and_itself_at_once(
    engine, checkpoints, transport
) -> None:
    meet, links = threading.Barrier(2), agreements(2)
    started = time.monotonic()
    running = ConcurrentCalls([
        lambda r=r: publish(
            Gathering(checkpoints[2], links[r], meet, fails=1), connect=lambda: engine,
            options=options(transport=transport, timeout=LONG),
        )
        for r in range(2)
    ])  # fmt: skip
    running.join(1)
    assert isinstance(running.got[1], SourceFailed)
    assert isinstance(running.got[1].__cause__, KeyError)
    free_again(engine, checkpoints[1])
    assert time.monotonic() - started < LONG / 2  # nobody waited for a deadline
    meet.abort()  # the collective's own timeout
    running.join()
    assert isinstance(running.got[0], SourceFailed), running.got[0]
    assert "no such shard" in str(running.got[0])


def test_what_raises_inside_a_step_raises_on_every_rank_before_the_gather() -> None:
    links = agreements(3)

    def call(link):
        with link.step("matrix"):
            if link.rank == 1:
                raise KeyError("no such shard")
        return "gathered"

    running = ConcurrentCalls([lambda link=link: call(link) for link in links])
    running.join()
    assert all(isinstance(error, SourceFailed) for error in running.got), running.got
    assert all("no such shard" in str(error) for error in running.got)


def test_an_iterable_that_stalls_lets_others_update_from_its_deadline_on(
    engine, checkpoints
) -> None:
    during = []

    def stalling():
        for index, item in enumerate(checkpoints[2].items()):
            if index == 6:
                during.append(Trainer(engine, "inline").send(checkpoints[1], timeout=LONG).version)
            yield item

    with pytest.raises(DeadlineExceeded, match=f"did not yield within {TIMEOUT:g} s after tensor"):
        Trainer(engine, "inline").send(stalling(), timeout=TIMEOUT)
    assert during == [engine.version]


class Placing(Boxes):
    """Gathers into given memory, and is slow once it had to wait for that."""

    waited = False

    def place_by(self, buffer_for) -> None:
        self._place = buffer_for

    def __iter__(self):
        for name, tensor in self._weights.items():
            began = time.monotonic()
            memory = self._place(tensor.dtype, tuple(tensor.shape))
            if time.monotonic() - began > TIMEOUT / 4:
                self.waited = True
                time.sleep(TIMEOUT / 2)
            yield name, tensor if memory is None else memory.copy_(tensor)


def test_waiting_for_the_engine_is_not_the_trainers_time(engine, checkpoints) -> None:
    """Neither takes longer than its deadline, the two together do."""
    honest = engine.ranks[0].stage_bucket

    def stage_bucket(args, tensors):
        engine.ranks[0].stage_bucket = honest
        time.sleep(0.8 * TIMEOUT)
        return honest(args, tensors)

    engine.ranks[0].stage_bucket = stage_bucket
    source = Placing(checkpoints[2], agreements(1)[0])
    Trainer(engine, "inline").send(source, timeout=TIMEOUT, bucket_bytes=96 << 10)
    assert source.waited


@pytest.mark.parametrize("hangs", [0, 1])
def test_a_comparison_whose_source_hangs_on_one_rank(engine, checkpoints, hangs) -> None:
    links, leave = agreements(2), threading.Event()
    running = ConcurrentCalls([
        lambda r=r: check_weights(
            Hanging(checkpoints[1], links[r], hangs, leave),
            connect=lambda: engine, timeout=TIMEOUT,
        )
        for r in range(2)
    ])  # fmt: skip
    running.join(1 - hangs)
    assert "did not yield" in str(running.got[1 - hangs])
    leave.set()
    running.join()
    assert all(isinstance(error, DeadlineExceeded) for error in running.got), running.got


def test_a_comparison_gathers_nothing_where_every_rank_reads_its_own(engine, checkpoints) -> None:
    free_again(engine, checkpoints[1])
    links = agreements(2)
    wrong = {**checkpoints[1], "model.norm.weight": checkpoints[1]["model.norm.weight"] + 1}
    running = ConcurrentCalls([
        lambda r=r: check_weights(
            Boxes(wrong, links[r]), connect=lambda: engine, timeout=LONG
        )
        for r in range(2)
    ])  # fmt: skip
    running.join()
    assert [report.differing for report in running.got] == [("model.norm.weight",)] * 2


@pytest.mark.parametrize("what", ["check", "write"])
def test_a_rank_that_fails_alone_is_heard_by_the_others(
    engine, checkpoints, tmp_path, what
) -> None:
    meet, links = threading.Barrier(2), agreements(2)

    def call(rank):
        source = Gathering(checkpoints[1], links[rank], meet, fails=1)
        if what == "check":
            return check_weights(source, connect=lambda: engine, timeout=LONG)
        return VersionWriter(LocalStore(tmp_path), dtype=torch.float32).write(
            source, 1, timeout=LONG
        )

    running = ConcurrentCalls([lambda r=r: call(r) for r in range(2)])
    running.join(1)
    assert isinstance(running.got[1], SourceFailed)
    meet.abort()
    running.join()
    assert isinstance(running.got[0], RolloutError)
    assert "no such shard" in str(running.got[0])
