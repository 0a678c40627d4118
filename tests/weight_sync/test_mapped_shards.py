"""Trainer ranks on the engine's GPU: what each of them holds is mapped and read where it lies.

Files stand for memory of a GPU (``pretended_cuda.on_cpu``).
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_ranks import Engine, same
from mapped_files import mapped_files, on_cpu, said_by_ranks
from pretended_cuda.segments import in_segment
from test_p2p import receipt_of, replicas
from trainer import fresh, nudged
from trainer_ranks import Boxes, DeltaTrainerRanks, TrainerRanks, drifted, rows, whole

from rollout.errors import ChecksumMismatch, ConfigError, RolloutError, SourceFailed, TransferFailed
from rollout.models.weight_io import table
from rollout.weight_sync.protocol.messages import Mappers, QuantizationGrid
from rollout.weight_sync.transports import cuda_handles, cuda_ipc, cuda_memory, lent_memory
from rollout.weights import Box


@pytest.fixture(scope="module", autouse=True)
def _mapped():
    with mapped_files():
        yield


@pytest.fixture(autouse=True)
def _no_handle_is_left():
    yield
    assert not cuda_memory.own_handles()


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["tp1", "tp2", "tp4"])
def engine(request, checkpoints):
    engine = Engine(checkpoints[0], request.param, checkpoints[1], "plain")
    tell = engine.info
    engine.info = lambda: replace(
        tell(), devices=(on_cpu.UUID,) * request.param, reaches=(on_cpu.UUID,)
    )
    yield engine
    engine.close()


@pytest.fixture
def trainers(engine):
    return TrainerRanks(engine, 2)


class Held(Boxes):
    """What a rank has lies in memory that others can map."""

    def __init__(self, boxes: Boxes, dtype: torch.dtype | None = None) -> None:
        vars(self).update(vars(boxes))
        self.held = {
            name: [(box, in_segment(self._weights[name][box.slices].to(dtype))) for box in found]
            for name, found in self._boxes.items()
        }

    def held_values(self, name):
        self.on_read(name)
        return self.held[name]


def held(rank, source):
    return Held(source)


def in_place(receipt, size: int) -> bool:
    """Whether every box of so many trainer ranks was read where it lay."""
    boxes, _, of, _ = receipt.details["read_in_place"].split(maxsplit=3)
    return receipt.transport == "ipc" and of == "of" and int(boxes) >= size


@pytest.mark.parametrize(
    ("size", "place"), [(2, rows), (3, rows), (4, replicas)], ids=["2", "3", "hsdp"]
)
def test_it_ends_like_a_fresh_start_and_each_byte_is_read_where_it_is(
    engine, checkpoints, size, place
) -> None:
    trainers = TrainerRanks(engine, size, place)
    for turn in range(4):  # from the third on as it was before
        weights = checkpoints[2 - turn % 2]
        receipt = receipt_of(trainers.send(weights, transport="auto", prepare=held))
        assert in_place(receipt, size), receipt
        assert "map what each trainer rank holds" in receipt.details["transport_reason"]
        assert "packed_because" not in receipt.details
        assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))
        assert receipt.num_bytes == receipt.wire_bytes
        sent = [int(part) for part in receipt.details["sent_bytes"].split(",")]
        assert len(sent) == size
        assert max(sent) <= 1.2 * sum(sent) / size
    assert [plans.num_planned for plans in trainers.plans] == [1] * size


def test_what_is_wider_is_cast_on_the_way(engine, trainers, checkpoints) -> None:
    def wide(rank, source):
        return Held(source, torch.float64)

    receipt = receipt_of(trainers.send(checkpoints[2], transport="ipc", prepare=wide))
    assert in_place(receipt, 2)
    assert receipt.wire_bytes == 2 * receipt.num_bytes
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))


def test_replicas_that_have_drifted_apart_are_refused(engine, checkpoints) -> None:
    trainers = TrainerRanks(engine, 4, replicas)
    before = engine.live()

    def apart(rank, source):
        return Held(drifted(rank, source))

    got = trainers.send(checkpoints[2], transport="ipc", prepare=apart)
    assert all(isinstance(one, ChecksumMismatch) and "model.norm" in str(one) for one in got), got
    assert same(engine.live(), before)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("begun", [False, True])
def test_a_rank_that_fails_ends_the_update_on_all(
    engine, trainers, checkpoints, who, begun, monkeypatch
) -> None:
    """As it looks at what it has, or once the engine has begun."""
    here, give = threading.local(), cuda_handles.GivenHandles.give

    def failing(rank, source):
        def read(name):
            if not begun and rank == who and "layers.1." in name:
                raise RuntimeError("the disk is gone")

        here.fails = begun and rank == who
        source.on_read = read
        return Held(source)

    def given(self, tensors):
        if here.fails:
            raise TransferFailed("the disk is gone")
        return give(self, tensors)

    monkeypatch.setattr(cuda_handles.GivenHandles, "give", given)
    before = engine.live()
    got = trainers.send(checkpoints[2], transport="ipc", prepare=failing)
    assert all("disk is gone" in str(one) for one in got), got
    assert {type(one) for one in got} == {TransferFailed if begun else SourceFailed}
    assert same(engine.live(), before)
    monkeypatch.setattr(cuda_handles.GivenHandles, "give", give)
    assert in_place(receipt_of(trainers.send(checkpoints[2], transport="ipc", prepare=held)), 2)


def test_no_rank_returns_while_its_memory_is_read(
    engine, trainers, checkpoints, monkeypatch
) -> None:
    """An engine's rank fails while another one is still at it."""
    reading, regions = threading.Event(), cuda_ipc.CudaIpcReceiver.regions
    ended: list[float] = []
    leave = lent_memory.MappedLent._leave

    def slow(self, header, carried):
        views = regions(self, header, carried)
        if self._rank == 0:
            reading.set()
            time.sleep(1.0)
            del views  # had them while it would have copied
            raise TransferFailed("this rank is told to stop")
        del views
        assert reading.wait(5)
        raise TransferFailed("the other one fails at once")

    def left(self):
        ended.append(time.monotonic())
        leave(self)

    def prepare(rank, source):
        return Held(source)

    monkeypatch.setattr(cuda_ipc.CudaIpcReceiver, "regions", slow)
    monkeypatch.setattr(lent_memory.MappedLent, "_leave", left)
    returned: list[float] = []
    closes = cuda_ipc.CudaIpcLender.close

    def closed(self):
        returned.append(time.monotonic())
        closes(self)

    monkeypatch.setattr(cuda_ipc.CudaIpcLender, "close", closed)
    got = trainers.send(checkpoints[2], transport="ipc", prepare=prepare)
    assert all(isinstance(one, RolloutError) for one in got), got
    assert returned[0] >= max(ended)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("made", "is made for the update, and stays nowhere"),
        ("apart", "it is not contiguous"),
        ("pool", "its memory cannot be mapped"),
        ("integers", "which is not cast on the way"),
    ],
)
def test_where_one_rank_has_what_cannot_be_mapped_all_send(
    engine, trainers, checkpoints, fault, why
) -> None:
    def prepare(rank, source):
        found = Held(source)
        if rank == 0:
            return found
        name = "model.layers.0.mlp.down_proj.weight"
        [(box, values)] = found.held[name]
        other = {
            "made": None,
            "apart": values.mT.contiguous().mT,
            "pool": values.clone(),
            "integers": values.to(torch.int32),
        }[fault]
        if other is None:
            return source
        found.held[name] = [(box, other)]
        return found

    if fault == "integers":
        got = trainers.send(checkpoints[2], transport="auto", prepare=prepare)
        assert all("int32" in str(one) for one in got), got
        return
    receipt = receipt_of(trainers.send(checkpoints[2], transport="auto", prepare=prepare))
    assert receipt.transport == "p2p"
    assert "not mapped: on trainer rank 1, " in receipt.details["transport_reason"]
    assert why in receipt.details["transport_reason"]
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))


def test_what_an_engine_holds_quantised_is_mapped(checkpoints) -> None:
    made = [
        Engine(checkpoints[0], 2, weights, "plain", quantization="int8")
        for weights in checkpoints[1:]
    ]
    engine, wanted = made
    tell = engine.info
    engine.info = lambda: replace(tell(), devices=(on_cpu.UUID,) * 2, reaches=(on_cpu.UUID,))
    try:
        receipt = receipt_of(
            TrainerRanks(engine, 3).send(checkpoints[2], transport="auto", prepare=held)
        )
        assert in_place(receipt, 3)
        assert same(engine.live(), wanted.live())
    finally:
        for one in made:
            one.close()


def test_rows_that_share_a_scale_are_not_cut_apart(
    engine, trainers, checkpoints, monkeypatch
) -> None:
    grid, tell = QuantizationGrid.of("fp8_block"), engine.info
    monkeypatch.setattr(engine, "info", lambda: replace(tell(), grid=grid))
    receipt = receipt_of(trainers.send(checkpoints[2], transport="auto", prepare=held))
    assert receipt.transport == "p2p"
    assert "rows share a scale" in receipt.details["transport_reason"]


def test_deltas_build_on_what_was_mapped(engine, checkpoints) -> None:
    """Where they are asked for, each rank keeps its own."""
    trainers = DeltaTrainerRanks(engine, 2)
    told = []
    for weights in (checkpoints[2], nudged(checkpoints[2], 0.01)):
        told.append(trainers.send(weights, transport="auto", prepare=held))
        assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))
    assert [receipt.details["encoding"] for receipt in told] == ["full", "delta"]
    assert told[0].transport == "ipc"
    assert "boxes of" in told[0].details["read_in_place"]


def test_a_trainer_that_lacks_the_libraries_of_cuda_sends(
    engine, trainers, checkpoints, monkeypatch
) -> None:
    def lacking():
        raise ConfigError("CUDA IPC needs libcudart.so.12, which cannot be loaded")

    monkeypatch.setattr(cuda_memory, "runtime", lacking)
    receipt = receipt_of(trainers.send(checkpoints[2], transport="auto", prepare=held))
    assert receipt.transport == "p2p"
    assert "cannot be loaded" in receipt.details["transport_reason"]
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))


class Gathered(Held):
    """Held, and its ranks can also gather."""

    gathers = 0

    def __iter__(self):
        Gathered.gathers += 1
        for name, tensor in self._weights.items():
            yield name, tensor if self.agreement.is_sender else tensor.to("meta")


def test_what_every_rank_holds_whole_is_not_said_to_be_mapped_of_each(engine, checkpoints) -> None:
    trainers = DeltaTrainerRanks(engine, 2, whole)
    receipt = trainers.send(
        checkpoints[2], transport="auto", encoding="full", prepare=lambda _, x: Gathered(x)
    )
    assert receipt.transport == "ipc"
    assert "its GPUs' memory can be mapped" in receipt.details["transport_reason"]


def test_where_no_rank_can_map_the_memory_all_send(
    engine, trainers, checkpoints, monkeypatch
) -> None:
    def refused(self, nbytes, handle):
        raise TransferFailed("cudaIpcOpenMemHandle failed")

    monkeypatch.setattr(lent_memory.MappedLent, "map", refused)
    receipt = receipt_of(trainers.send(checkpoints[2], transport="auto", prepare=held))
    assert receipt.transport == "p2p"
    assert "cudaIpcOpenMemHandle failed" in receipt.details["transport_reason"]
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))
    got = trainers.send(checkpoints[1], transport="ipc", prepare=held)
    assert all("cudaIpcOpenMemHandle failed" in str(one) for one in got), got


def test_where_a_ranks_memory_turns_out_to_be_refused_later_updates_go_another_way(
    engine, checkpoints, monkeypatch
) -> None:
    """That of another GPU, say, which is heard once the update is under way. Not so where such an
    update has succeeded before: then somebody was gone.
    """
    proven, trainers = TrainerRanks(engine, 2), TrainerRanks(engine, 2)
    receipt_of(proven.send(checkpoints[2], transport="auto", prepare=held))
    map_all = lent_memory.MappedRegions.map_all

    def refused(self, wanted):
        raise TransferFailed("cudaIpcOpenMemHandle failed: invalid argument (1)")

    for one, then in ((trainers, "p2p"), (proven, "ipc")):
        monkeypatch.setattr(lent_memory.MappedRegions, "map_all", refused)
        got = one.send(checkpoints[1], transport="auto", prepare=held)
        assert all("invalid argument (1)" in str(error) for error in got), got
        monkeypatch.setattr(lent_memory.MappedRegions, "map_all", map_all)
        receipt = receipt_of(one.send(checkpoints[1], transport="auto", prepare=held))
        assert receipt.transport == then
        lately = "not mapped: it could not be lately" in receipt.details["transport_reason"]
        assert lately == (then == "p2p")


def test_of_part_of_a_model_whose_copies_are_kept_boxes_are_sent(engine, checkpoints) -> None:
    name = "model.norm.weight"
    receipt = DeltaTrainerRanks(engine, 2).send(
        {name: checkpoints[2][name]}, transport="auto", prepare=held, partial=True
    )
    assert receipt.transport == "p2p"
    assert "copies are kept for deltas" in receipt.details["transport_reason"]


def columns(shape, rank: int, size: int) -> list[Box]:
    """Every rank has a part of each row, as of what is tensor-parallel along its inputs."""
    if len(shape) == 1:
        return rows(shape, rank, size)
    [box] = rows(shape[::-1], rank, size)
    return [Box(box.starts[::-1], box.stops[::-1])]


@pytest.mark.parametrize("scheme", ["int8", "fp8", "mxfp4"])
def test_of_rows_that_share_a_scale_few_wait_for_their_other_halves(
    checkpoints, monkeypatch, scheme
) -> None:
    monkeypatch.setattr(table, "PENDING", 0)  # two of the largest tensors may
    quantised, other = (
        Engine(checkpoints[0], 2, weights, quantization=scheme) for weights in checkpoints[1:]
    )
    tell = quantised.info
    quantised.info = lambda: replace(tell(), devices=(on_cpu.UUID,) * 2, reaches=(on_cpu.UUID,))
    try:
        trainers = TrainerRanks(quantised, 2, columns)
        receipt = receipt_of(trainers.send(checkpoints[2], transport="auto", prepare=held))
        assert in_place(receipt, 2), receipt
        assert same(quantised.live(), other.live())
    finally:
        quantised.close()
        other.close()


def test_a_rank_that_finds_no_flags_gives_the_engine_time_to_stop(monkeypatch) -> None:
    """The first rank's process may be dead, of which the engine hears by itself."""

    def gone(self, nbytes, handle):
        raise TransferFailed("cudaIpcOpenMemHandle failed")

    monkeypatch.setattr(lent_memory.Mapped, "map", gone)
    monkeypatch.setattr(lent_memory, "OPEN_WAIT", 0.3)
    packed = cuda_memory.pack_handle(on_cpu.UUID, 3 * cuda_ipc.FLAGS, "0" * 32, bytes(64))
    offer = cuda_ipc.SharedAllocation(handle=packed, secret="0" * 32, half=cuda_ipc.FLAGS)
    started = time.monotonic()
    with closing(cuda_ipc.CudaIpcLender(offer, 1, timeout=10.0)) as lender:
        lender.until_unread()
    assert time.monotonic() - started >= 0.3


def test_for_a_member_that_was_given_up_the_first_rank_keeps_what_it_lent(
    engine, trainers, checkpoints, monkeypatch
) -> None:
    kept: list[int] = []
    free, accepted = lent_memory._free, cuda_ipc.CudaIpcSender.accepted

    def freed(*given):
        kept.append(sum(tensor.nbytes for tensor in given[-1]))
        free(*given)

    def of_a_fleet(self, begun):
        mappers = Mappers(ranks=self._memory.num_flags, reaches=(on_cpu.UUID,))
        accepted(self, replace(begun, mappers=mappers))

    monkeypatch.setattr(lent_memory, "_free", freed)
    monkeypatch.setattr(cuda_ipc.CudaIpcSender, "accepted", of_a_fleet)
    receipt = receipt_of(trainers.send(checkpoints[2], transport="auto", prepare=held))
    assert in_place(receipt, 2), receipt
    deadline = time.monotonic() + 5
    while not kept and time.monotonic() < deadline:
        time.sleep(0.01)
    assert kept == [int(receipt.details["sent_bytes"].split(",")[0])]


def test_where_a_fleets_member_does_not_map_what_each_rank_holds_it_is_gathered(
    engine, trainers, checkpoints, monkeypatch
) -> None:
    accepted = cuda_ipc.CudaIpcSender.accepted

    def of_a_fleet(self, begun):
        mappers = Mappers(ranks=self._memory.num_flags, reaches=("another",))
        accepted(self, replace(begun, mappers=mappers))

    monkeypatch.setattr(cuda_ipc.CudaIpcSender, "accepted", of_a_fleet)
    receipt = receipt_of(
        trainers.send(checkpoints[2], transport="auto", prepare=lambda _, x: Gathered(x))
    )
    assert receipt.transport == "ipc"
    assert receipt.details["transport_reason"].endswith("holds, but not of every GPU")
    assert "read_in_place" not in receipt.details
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))


@pytest.mark.more
@pytest.mark.parametrize("world", [1, 3])
def test_shards_of_fsdp2_in_processes_of_their_own(tmp_path: Path, world: int) -> None:
    """Of other dtypes than the engine's, and of fused experts; or whole ones, on one rank."""
    found = said_by_ranks(tmp_path, world)
    assert [arch for arch, *_ in found] == ["qwen3", "qwen3", "qwen3_moe"]
    for arch, transport, in_place, differing in found:
        assert (transport, differing) == ("ipc", []), arch
        assert re.fullmatch(r"\d+ tensors" if world == 1 else r"\d+ boxes of \d+ tensors", in_place)
