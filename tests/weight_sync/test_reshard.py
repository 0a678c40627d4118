"""Trainer ranks that bring each other boxes, and lend each engine rank what it wants.

Files stand for memory of a GPU (``pretended_cuda.on_cpu``), and threads' hands for NCCL.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_ranks import Engine, same
from mapped_files import mapped_files, on_cpu, said_by_ranks
from test_p2p import receipt_of, replicas
from trainer import fresh
from trainer_ranks import Boxes, CountedGathers, TrainerRanks, drifted, rows, wanted_bytes, whole

from rollout.errors import ChecksumMismatch, DeadlineExceeded, SourceFailed, TransferFailed
from rollout.weight_sync.protocol.bucket import check_size
from rollout.weight_sync.protocol.messages import MIN_BUCKET_BYTES, BucketHeader
from rollout.weight_sync.trainer import resharded_boxes
from rollout.weight_sync.trainer.reshard_plan import laid_out, plan_rounds
from rollout.weight_sync.trainer.transfer_stats import TransferStats
from rollout.weight_sync.transports import cuda_memory, lent_memory
from rollout.weight_sync.transports.cuda_memory import FLAGS, pack_handle
from rollout.weight_sync.transports.cuda_reshard import ReshardReceiver, relays
from rollout.weights import Box, TensorMeta

SECRET = "00112233445566778899aabbccddeeff"
CARDS = on_cpu.UUIDS[:4]  # of the trainer's ranks
EXCHANGE = resharded_boxes.exchange


class Exchanges:
    """``all_to_all_single`` among threads, each of which is a rank with a payload of its own."""

    def __init__(self) -> None:
        self.size, self.turn = 0, threading.Condition()
        self.came: list[tuple] = []
        self.sent_bytes = self.rounds = 0

    def __call__(self, into, payload, coming, leaving):
        work = Work()
        with self.turn:
            self.came.append((rank_of(), into, payload, coming, leaving, work))
            if len(self.came) == self.size:
                self._exchange(sorted(self.came, key=lambda one: one[0]))
                self.came = []
        return work

    def _exchange(self, came) -> None:
        self.rounds += 1
        for rank, into, _, coming, _, work in came:
            parts = []
            for src, _, payload, _, leaving, _ in came:
                start = sum(leaving[:rank])
                assert coming[src] == leaving[rank]
                parts.append(payload[start : start + leaving[rank]])
            into.copy_(torch.cat(parts))
            self.sent_bytes += into.numel()
            work.done.set()


class Work:
    def __init__(self) -> None:
        self.done = threading.Event()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        assert self.done.is_set()


_ranks = threading.local()


def rank_of() -> int:
    return _ranks.rank


class Colocated(TrainerRanks):
    """Ranks that exchange, none of whose memory can be mapped where it lies."""

    def __init__(self, engine, size: int, place=rows, exchanges=None) -> None:
        super().__init__(engine, size, place)
        self.exchanges = exchanges

    def send(self, weights, *, transport="auto", prepare=lambda rank, source: source, **options):
        self.exchanges.size, self.exchanges.came = self.size, []

        def of_rank(rank, source):
            _ranks.rank = rank
            return prepare(rank, source)

        return super().send(weights, transport=transport, prepare=of_rank, **options)


@pytest.fixture(scope="module", autouse=True)
def exchanges():
    found = Exchanges()
    exchange = (resharded_boxes, "exchange", lambda *args: found(*args))
    with mapped_files(*on_cpu.exchanging(rank_of), exchange):
        yield found


@pytest.fixture(autouse=True)
def _no_handle_is_left():
    yield
    assert not cuda_memory.own_handles()


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["tp1", "tp2", "tp4"])
def engine(request, checkpoints):
    engine = Engine(checkpoints[0], request.param, checkpoints[1], "plain")
    tell, devices = engine.info, tuple(CARDS[rank % 2] for rank in range(request.param))
    engine.info = lambda: replace(tell(), devices=devices, reaches=tuple(CARDS))
    yield engine
    engine.close()


@pytest.fixture
def trainers(engine, exchanges):
    return Colocated(engine, 2, exchanges=exchanges)


@pytest.mark.parametrize(
    ("size", "place"), [(2, rows), (3, rows), (4, replicas)], ids=["2", "3", "hsdp"]
)
def test_it_ends_like_a_fresh_start_and_no_byte_is_lent_twice(
    engine, checkpoints, exchanges, size, place
) -> None:
    trainers = Colocated(engine, size, place, exchanges)
    for weights in (checkpoints[2], checkpoints[1]):
        before = exchanges.rounds, exchanges.sent_bytes
        receipt = receipt_of(trainers.send(weights))
        assert (receipt.transport, receipt.version) == ("reshard", engine.version)
        assert "bring each of its ranks what it wants" in receipt.details["transport_reason"]
        assert "stays nowhere" in receipt.details["transport_reason"]
        assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))
        least = wanted_bytes(engine)
        assert least <= receipt.wire_bytes <= 1.01 * least
        assert least <= exchanges.sent_bytes - before[1] <= 1.1 * least  # each part is aligned
        assert exchanges.rounds - before[0] > 2
        sent = [int(part) for part in receipt.details["sent_bytes"].split(",")]
        assert len(sent) == size
        assert max(sent) <= 1.2 * sum(sent) / size
    assert [plans.num_planned for plans in trainers.plans] == [1] * size


class Staying(Boxes):
    """What a rank has stays where it is, in memory that no other process can map."""

    def held_values(self, name):
        return self.local_values(name)


def test_what_stays_is_digested_a_round_at_a_time(
    engine, trainers, checkpoints, monkeypatch
) -> None:
    """As with ``expandable_segments``."""

    def one(self, *args):
        raise AssertionError("a tensor was digested by itself")

    def staying(rank, source):
        return Staying(source._weights, source.agreement)

    monkeypatch.setattr(TransferStats, "digest", one)
    receipt = receipt_of(trainers.send(checkpoints[2], prepare=staying))
    assert receipt.transport == "reshard"
    assert "expandable_segments" in receipt.details["transport_reason"]
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))


def test_it_can_be_asked_for(engine, trainers, checkpoints) -> None:
    receipt = receipt_of(trainers.send(checkpoints[2], transport="reshard", bucket_bytes=1 << 20))
    assert (receipt.transport, receipt.details["transport_reason"]) == ("reshard", "asked for")
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))


def test_replicas_that_have_drifted_apart_are_refused(engine, checkpoints, exchanges) -> None:
    trainers, before = Colocated(engine, 4, replicas, exchanges), engine.live()
    got = trainers.send(checkpoints[2], prepare=drifted)
    assert all(isinstance(one, ChecksumMismatch) and "model.norm" in str(one) for one in got), got
    assert same(engine.live(), before)


def test_whole_weights_are_brought_where_not_every_rank_sees_the_first_ones(
    engine, checkpoints, exchanges, monkeypatch
) -> None:
    """DDP, of which each rank has everything."""

    def gathering(rank, source):
        return CountedGathers(source._weights, source.agreement, whole)

    tell, trainers, found = engine.info, Colocated(engine, 2, whole, exchanges), []
    for reaches in ((on_cpu.UUID,), ("another",)):
        info = replace(tell(), reaches=reaches)
        monkeypatch.setattr(engine, "info", lambda info=info: replace(info, version=engine.version))
        receipt = receipt_of(trainers.send(checkpoints[2], prepare=gathering))
        found.append(receipt.transport)
        assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))
    assert found == ["ipc", "reshard"]


@pytest.mark.parametrize(("scheme", "ranks"), [("int8", 2), ("fp8_block", 1)])
def test_what_an_engine_holds_quantised_is_brought(checkpoints, exchanges, scheme, ranks) -> None:
    made = [
        Engine(checkpoints[0], ranks, weights, "plain", quantization=scheme)
        for weights in checkpoints[1:]
    ]
    engine, wanted = made
    tell = engine.info
    engine.info = lambda: replace(tell(), devices=(on_cpu.UUID,) * ranks, reaches=(on_cpu.UUID,))
    try:
        receipt = receipt_of(Colocated(engine, 3, exchanges=exchanges).send(checkpoints[2]))
        assert receipt.transport == "reshard"
        assert same(engine.live(), wanted.live())
    finally:
        for one in made:
            one.close()


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_fails_all_of_them_and_the_next_update_is_none_the_worse(
    engine, trainers, checkpoints, who
) -> None:
    before = engine.live()

    def failing(rank, source):
        def stop(name):
            if "layers.1.mlp" in name:
                raise RuntimeError("the disk is full")

        if rank == who:
            source.on_read = stop
        return source

    got = trainers.send(checkpoints[2], prepare=failing)
    assert all(isinstance(one, SourceFailed) and "disk is full" in str(one) for one in got), got
    assert same(engine.live(), before)
    receipt = receipt_of(trainers.send(checkpoints[2]))
    assert receipt.transport == "reshard"


def test_an_exchange_that_does_not_end_is_given_up(
    engine, trainers, checkpoints, exchanges, monkeypatch
) -> None:
    """A peer of the trainer's own group that is gone, of which NCCL says nothing. What it may write
    to is not freed: CUDA would wait, and all that is asked of it.
    """
    before, started = engine.live(), time.monotonic()
    works, lent, close = [], [], lent_memory.LentMemory.close

    def told(self):
        lent.append(self._pointer)
        close(self)

    def left():
        return [pointer for pointer in lent if pointer in cuda_memory.runtime()._held]

    monkeypatch.setattr(lent_memory.LentMemory, "close", told)
    monkeypatch.setattr(lent_memory, "OPEN_WAIT", 0.1)
    monkeypatch.setattr(
        exchanges, "_exchange", lambda came: works.extend(work for *_, work in came)
    )
    got = trainers.send(checkpoints[2], timeout=2.0)
    assert all(isinstance(one, DeadlineExceeded) for one in got), got
    assert any("exchange round 0" in str(one) for one in got)
    assert time.monotonic() - started < 20
    assert same(engine.live(), before)
    time.sleep(1.0)
    assert lent
    assert left() == lent
    for work in works:
        work.done.set()
    deadline = time.monotonic() + 10
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left()
    assert receipt_of(trainers.send(checkpoints[2])).transport == "p2p"


def test_an_exchange_that_does_not_begin_is_given_up(
    engine, trainers, checkpoints, monkeypatch
) -> None:
    """NCCL's first exchange meets all peers, one of which may be gone."""
    idle = []

    def stuck(*args):
        deadline = time.monotonic() + 8
        while rank_of() == 0 and engine.info().state != "idle" and time.monotonic() < deadline:
            time.sleep(0.05)
        if rank_of() == 0:
            idle.append(engine.info().state)
        return Work()

    monkeypatch.setattr(resharded_boxes, "exchange", stuck)
    got = trainers.send(checkpoints[2], timeout=2.0)
    assert all(isinstance(one, DeadlineExceeded) for one in got), got
    assert idle == ["idle"]


def test_no_room_to_receive_in_fails_all_ranks(engine, trainers, checkpoints, monkeypatch) -> None:
    def none(self, *args):
        raise TransferFailed("cudaMalloc failed: out of memory (2)")

    monkeypatch.setattr(lent_memory.LentMemory, "__init__", none)
    got = trainers.send(checkpoints[2])
    assert all(isinstance(one, TransferFailed) and "out of memory" in str(one) for one in got), got


def test_what_torch_holds_and_does_not_use_is_taken_to_receive_in(
    engine, trainers, checkpoints, monkeypatch
) -> None:
    allocate, emptied = on_cpu.Runtime.allocate, threading.Event()

    def none(self, nbytes):
        if not emptied.is_set():
            raise TransferFailed("cudaMalloc failed: out of memory (2)")
        return allocate(self, nbytes)

    monkeypatch.setattr(on_cpu.Runtime, "allocate", none)
    monkeypatch.setattr(lent_memory.torch.cuda, "empty_cache", emptied.set)
    assert receipt_of(trainers.send(checkpoints[2])).transport == "reshard"


def test_where_memory_is_refused_later_updates_go_another_way(
    engine, trainers, checkpoints, monkeypatch
) -> None:
    """As in containers that share no process ids: an engine's rank hears it from the driver."""

    def refused(self, nbytes, handle):
        raise TransferFailed("cudaIpcOpenMemHandle failed: invalid argument (1)")

    monkeypatch.setattr(lent_memory.MappedLent, "map", refused)
    got = trainers.send(checkpoints[2])
    assert all(isinstance(one, TransferFailed) for one in got), got
    assert "cudaIpcOpenMemHandle failed" in str(got[0])
    receipt = receipt_of(trainers.send(checkpoints[2]))
    assert receipt.transport == "p2p"
    assert "no reshard: not there lately" in receipt.details["transport_reason"]
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))


def test_what_is_lent_is_freed_when_the_engine_has_read_it(
    engine, trainers, checkpoints, monkeypatch
) -> None:
    freed = threading.Semaphore(0)
    free = on_cpu.Runtime.free

    def counted(self, pointer):
        free(self, pointer)
        freed.release()

    monkeypatch.setattr(on_cpu.Runtime, "free", counted)
    monkeypatch.setattr(lent_memory, "OPEN_WAIT", 60.0)  # of a rank that may still come
    receipt_of(trainers.send(checkpoints[2]))
    for _ in range(min(2, len(engine.ranks))):  # of each relay
        assert freed.acquire(timeout=10)


def test_the_shortest_bucket_is_shared_by_the_ranks_of_a_relay(
    engine, trainers, checkpoints
) -> None:
    name = "model.norm.weight"
    weights = {name: checkpoints[2][name] + 1}
    receipt = receipt_of(trainers.send(weights, bucket_bytes=MIN_BUCKET_BYTES, partial=True))
    assert receipt.transport == "reshard"
    assert all(torch.equal(rank[name], weights[name]) for rank in engine.live())


def test_a_source_that_stays_where_it_can_be_mapped_is_not_brought(
    engine, trainers, checkpoints
) -> None:
    from test_mapped_shards import held

    assert receipt_of(trainers.send(checkpoints[2], prepare=held)).transport == "ipc"


@pytest.mark.more
@pytest.mark.parametrize("world", [2, 3])
def test_shards_of_fsdp2_in_processes_of_their_own(tmp_path: Path, world: int) -> None:
    """Brought by gloo, of other dtypes than the engine's, and of fused experts."""
    found = said_by_ranks(tmp_path, world, "apart")
    assert found == [[arch, "reshard", None, []] for arch in ("qwen3", "qwen3", "qwen3_moe")]


# ---- where they do not ----


def test_ranks_that_share_a_gpu_send_as_before(engine, trainers, checkpoints, monkeypatch) -> None:
    """NCCL refuses them."""
    monkeypatch.setattr(on_cpu.mapped_shards, "gpu_uuid", lambda device: on_cpu.UUID)
    for transport, weights in (("auto", checkpoints[2]), ("reshard", checkpoints[1])):
        receipt = receipt_of(trainers.send(weights, transport=transport))
        assert receipt.transport == "p2p"
        reason = receipt.details["transport_reason"]
        assert reason.count("no reshard: trainer ranks 0 and 1 are on one GPU; the weights") == 1
        assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))


def test_where_nccl_refuses_later_updates_go_another_way(
    engine, trainers, checkpoints, exchanges, monkeypatch
) -> None:
    def refused(*args, **kwargs):
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(dist, "all_to_all_single", refused)
    with monkeypatch.context() as patch:
        patch.setattr(resharded_boxes, "exchange", EXCHANGE)
        got = trainers.send(checkpoints[2])
    assert all(isinstance(one, TransferFailed) for one in got), got
    assert all("cannot exchange boxes: NCCL error" in str(one) for one in got), got
    assert receipt_of(trainers.send(checkpoints[2])).transport == "p2p"


def test_ranks_without_a_job_of_their_own_or_without_nccl_exchange_nothing(monkeypatch) -> None:
    why_not = resharded_boxes.why_not_exchanged
    assert why_not((0, 1)) == "it is in no job of torch.distributed"
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for backends, why in (
        ("cpu:gloo,cuda:nccl", ""),
        ("cuda:nccl", ""),
        ("cpu:gloo,cuda:gloo", "it"),
    ):
        monkeypatch.setattr(dist, "get_backend_config", lambda backends=backends: backends)
        assert why_not((0, 1)).startswith(why)
        assert bool(why_not((0, 1))) == bool(why)
    assert "a part of the trainer's job" in why_not((1,))


# ---- who lends to whom ----


@pytest.fixture
def told(engine, trainers, checkpoints, monkeypatch):
    """``relays`` with what the trainer's ranks have told of themselves."""
    found = []
    monkeypatch.setattr(
        "rollout.weight_sync.transports.cuda_reshard.relays",
        lambda info, holding: found.append((info, holding)),
    )
    trainers.send(checkpoints[2])
    return found[0]


def test_each_engine_rank_has_the_trainer_rank_on_its_own_gpu(told) -> None:
    info, holding = told

    def chosen(devices, gpus, reaches=(), hosts=None):
        at = replace(info, devices=devices, reaches=reaches)
        hosts = hosts or (info.host,) * len(gpus)
        return relays(at, replace(holding, rank_gpus=gpus, hosts=hosts))

    assert chosen(("b", "a"), ("a", "b")) == (1, 0)
    assert chosen(("b", "a"), ("a", "b", "c", "d")) == (1, 0)  # the others send alone
    assert chosen(("c", "a"), ("a", "b")) is None
    assert chosen(("c", "a"), ("a", ""), reaches=("a", "c")) == (0, 0)
    assert chosen(("c", "d", "e"), ("a", "b"), reaches=("a", "b")) == (0, 1, 0)
    assert chosen(("a", "b"), ("a", "a", "b"), reaches=("a", "b")) == (0, 2)
    assert chosen(("a",), ("a", "a"), hosts=("elsewhere", info.host)) == (1,)
    assert chosen(("",), ("", "")) is None  # MIG


def test_messages_to_one_relay_lie_by_sender_and_stay_within_a_bucket() -> None:
    metas = [TensorMeta(f"w{i}", torch.float32, (24, 5)) for i in range(9)]
    have = [{m.name: tuple(rows(m.shape, rank, 3)) for m in metas} for rank in range(3)]
    want = [{m.name: tuple(rows(m.shape, rank, 4)) for m in metas} for rank in range(4)]
    of = (2, 0, 2, 0)
    seen: dict[tuple[int, str], list[Box]] = {}
    for header in plan_rounds(metas, have, want, 2048):
        there = laid_out(header, of)
        check_size(there, 2 * 2048)
        for relay in set(of):
            mine = [m for m in there.messages if of[m.dst] == relay]
            assert [(m.src, m.dst) for m in mine] == sorted((m.src, m.dst) for m in mine)
            for message, after in pairwise(mine):
                assert message.stop <= after.start
                assert message.start % 64 == 0
        for message in there.messages:
            for entry in message.entries:
                assert message.start <= entry.offset <= message.stop - entry.nbytes
                seen.setdefault((message.dst, entry.name), []).append(entry.box)
    for rank, wanted in enumerate(want):
        for name, boxes in wanted.items():
            assert sum(box.numel for box in seen[rank, name]) == sum(x.numel for x in boxes)


# ---- what a rank refuses ----


def _round(handle: str, rank: int = 0) -> BucketHeader:
    return BucketHeader(0, (), 0, regions=("",) * rank + (handle,))


@pytest.mark.parametrize(
    ("handle", "why"),
    [
        ("00", "a handle of 1 bytes"),
        (pack_handle(on_cpu.UUID, 3 * FLAGS, SECRET[::-1], bytes(64)), "not marked"),
        (pack_handle(on_cpu.UUID, 5 * FLAGS, SECRET, bytes(64)), "not agreed on"),
        (pack_handle(on_cpu.UUID, FLAGS, SECRET, bytes(64)), "not agreed on"),
        (pack_handle(on_cpu.UUID, 3 * FLAGS + 1, SECRET, bytes(64)), "not agreed on"),
        (pack_handle(on_cpu.UUID, 3 * FLAGS, SECRET, bytes(64)), "cudaIpcOpenMemHandle failed"),
    ],
)
def test_a_rank_refuses_memory_that_it_cannot_trust(handle: str, why: str) -> None:
    receiver = ReshardReceiver(SECRET, 1, FLAGS, torch.device("cpu"))
    receiver.connect(1.0)
    with pytest.raises(TransferFailed, match=why):
        receiver.receive(_round(handle, 1), None, 1.0)


def test_a_rank_that_a_round_does_not_tell_of_says_so() -> None:
    receiver = ReshardReceiver(SECRET, 1, FLAGS, torch.device("cpu"))
    receiver.connect(1.0)
    with pytest.raises(TransferFailed, match="the round tells of 1 ranks"):
        receiver.receive(_round("00"), None, 1.0)
    receiver.close()
    with pytest.raises(TransferFailed, match="aborted before bucket 0"):
        receiver.receive(_round("00", 1), None, 1.0)
