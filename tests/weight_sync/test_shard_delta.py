"""Changes found where each rank's part lies: nothing is gathered, and the same bits arrive."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_ranks import Engine, same
from torch.utils._python_dispatch import TorchDispatchMode
from trainer import fresh, nudged
from trainer_ranks import CountedGathers, DeltaTrainerRanks, rows, whole

from rollout.errors import ChecksumMismatch, RolloutError, SourceFailed
from rollout.kernels import diff_update
from rollout.testing.faults import Fault, Faulty
from rollout.weight_sync.protocol.committed import DeltaBase
from rollout.weights import Box, SparsePatch
from rollout.weights.box import interval_boxes
from rollout.weights.positions import positions_in_whole


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def engine(request, checkpoints):
    engine = Engine(checkpoints[0], request.param, checkpoints[1])
    yield engine
    engine.close()


class FarLink:
    def __init__(self, engine):
        self._engine = engine
        self.open, self.receipts = engine.open, engine.receipts
        self.local_address = engine.local_address

    def info(self):
        return replace(self._engine.info(), host="far away")


def columns(shape, rank, size):
    """A tensor-parallel shard: the last dimension, cut."""
    step = -(-shape[-1] // size)
    start, stop = min(rank * step, shape[-1]), min((rank + 1) * step, shape[-1])
    box = Box((*(0 for _ in shape[1:]), start), (*shape[:-1], stop))
    return [box] if box.numel else []


def flat(shape, rank, size):
    """ZeRO-3's partition of the flattened tensor: up to three boxes."""
    numel = torch.Size(shape).numel()
    step = -(-numel // size)
    return interval_boxes(tuple(shape), min(rank * step, numel), min((rank + 1) * step, numel))


def paired(shape, rank, size):
    """HSDP: two replicas of two row shards."""
    return rows(shape, rank % 2, 2)


@pytest.mark.parametrize(
    ("size", "place"),
    [(2, rows), (3, rows), (2, columns), (3, flat), (4, paired), (2, whole)],
    ids=["fsdp2", "fsdp3", "columns", "zero3", "hsdp", "ddp"],
)
def test_each_rank_sends_what_changed_in_its_part(engine, checkpoints, size, place) -> None:
    ranks, weights = DeltaTrainerRanks(engine, size, place), checkpoints[2]
    full = ranks.send(weights)
    assert full.details["encoding"] == "full"
    assert CountedGathers.gathers == size
    nbytes = sum(t.nbytes for t in weights.values())
    # Each rank keeps its own part, and all of them together one model.
    assert sum(base.nbytes for base in ranks.bases) == nbytes
    assert max(base.nbytes for base in ranks.bases) <= 0.8 * nbytes
    for seed in (1, 2):
        weights = nudged(weights, 0.01, seed)
        receipt = ranks.send(weights)
        assert CountedGathers.gathers == 0
        assert receipt.details["encoding"] == "delta"
        assert "each trainer rank compares its own part" in receipt.details["encoding_reason"]
        assert receipt.wire_bytes <= 0.04 * full.wire_bytes
        assert receipt.num_bytes == full.num_bytes
        assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))
    again = ranks.send(weights)
    assert (again.wire_bytes, again.digest) == (0, receipt.digest)


@pytest.mark.parametrize("transport", ["inline", "ipc", "broadcast", "auto"])
def test_the_transport_makes_no_difference(engine, checkpoints, transport) -> None:
    ranks = DeltaTrainerRanks(engine, 2)
    ranks.send(checkpoints[2], transport=transport)
    weights = nudged(checkpoints[2], 0.01)
    receipt = ranks.send(weights, transport=transport)
    assert receipt.details["encoding"] == "delta"
    assert CountedGathers.gathers == 0
    assert receipt.transport == ("ipc" if transport == "auto" else transport)
    assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))


def test_peer_to_peer_sends_boxes_whole_and_says_so(engine, checkpoints) -> None:
    ranks = DeltaTrainerRanks(engine, 2)
    for weights in (checkpoints[1], checkpoints[2]):
        receipt = ranks.send(weights, transport="p2p")
        assert (receipt.transport, receipt.details["encoding"]) == ("p2p", "full")
        assert "changes need another transport" in receipt.details["encoding_reason"]
    assert [base.nbytes for base in ranks.bases] == [0, 0]


def test_a_part_whose_elements_all_changed_goes_whole_beside_changes(engine, checkpoints) -> None:
    ranks, weights = DeltaTrainerRanks(engine, 2), checkpoints[2]
    full = ranks.send(weights)
    name = "model.layers.0.mlp.down_proj.weight"
    weights = nudged(weights, 0.01)
    weights[name][: len(weights[name]) // 2] += 1.0  # the first rank's rows
    receipt = ranks.send(weights)
    assert receipt.details["encoding"] == "delta"
    half = weights[name].nbytes // 2
    assert half < receipt.wire_bytes <= half + 0.04 * full.wire_bytes
    assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))


def test_anchors_and_foreign_commits_are_full_and_keep_parts(engine, checkpoints) -> None:
    ranks, other = DeltaTrainerRanks(engine, 2), DeltaTrainerRanks(engine, 2)
    kinds = [
        ranks.send(nudged(checkpoints[2], 0.01, seed), anchor_every=3).details["encoding"]
        for seed in range(5)
    ]
    assert kinds == ["full", "delta", "delta", "full", "delta"]
    other.send(checkpoints[1])
    receipt = ranks.send(checkpoints[2])
    assert receipt.details["encoding"] == "full"
    assert "does not hold" in receipt.details["encoding_reason"]
    assert ranks.send(checkpoints[1]).details["encoding"] == "delta"
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[1]))


def test_a_rank_that_lost_its_copies_makes_the_update_full(engine, checkpoints) -> None:
    ranks = DeltaTrainerRanks(engine, 2)
    ranks.send(checkpoints[2])
    ranks.bases[1] = DeltaBase()  # it was restarted
    assert ranks.send(checkpoints[1]).details["encoding"] == "full"
    assert ranks.send(checkpoints[2]).details["encoding"] == "delta"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_read_its_part_fails_all(engine, checkpoints, rank) -> None:
    ranks = DeltaTrainerRanks(engine, 2)
    ranks.send(checkpoints[2])
    before, live = engine.live(), engine.version

    def fail(reader, name):
        if reader == rank and name == "model.norm.weight":
            raise OSError("the shard is gone")

    with pytest.raises(SourceFailed, match="the shard is gone"):
        ranks.send(nudged(checkpoints[2], 0.01), on_read=fail)
    assert same(engine.live(), before)
    assert (engine.version, engine.info().state) == (live, "idle")
    # What its copies hold is no longer what is live.
    assert ranks.send(checkpoints[2]).details["encoding"] == "full"


def test_a_flipped_bit_or_a_wrong_copy_cannot_pass(engine, checkpoints) -> None:
    ranks = DeltaTrainerRanks(engine, 2)
    ranks.send(checkpoints[2])
    before = engine.live()
    weights = nudged(checkpoints[2], 0.01)
    with pytest.raises(RolloutError):
        ranks.send(weights, transport=Faulty("inline", Fault("flip", bit=1003)))
    assert same(engine.live(), before)
    ranks.send(checkpoints[2])
    # A copy that is not what was committed, at an element that moves to just that value.
    copies = ranks.bases[1].take()
    (name, box), held = next(iter(copies.values.items()))
    held.view(-1)[0] += 1
    ranks.bases[1].put(copies)
    moved = {n: t.clone() for n, t in checkpoints[2].items()}
    moved[name][box.starts] += 1
    with pytest.raises(ChecksumMismatch, match=name.replace(".", r"\.")):
        ranks.send(moved)
    assert same(engine.live(), before)


def test_auto_compares_parts_for_an_engine_on_another_host(engine, checkpoints) -> None:
    ranks, link = DeltaTrainerRanks(engine, 2), FarLink(engine)
    automatic = {"transport": "auto", "encoding": "auto", "link": link}
    first = ranks.send(checkpoints[2], **automatic)
    assert (first.transport, first.details["encoding"]) == ("p2p", "full")
    weights = nudged(checkpoints[2], 0.01)
    second = ranks.send(weights, **automatic)
    assert (second.transport, second.details["encoding"]) == ("broadcast", "delta")
    assert second.wire_bytes <= 0.04 * first.num_bytes
    assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))
    assert ranks.send(checkpoints[1], **automatic).details["encoding"] == "delta"
    assert sum(base.nbytes for base in ranks.bases) == 0  # everything had changed
    assert ranks.send(checkpoints[1], **automatic).details["encoding"] == "full"


@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0, 0), (4, 5, 6)), Box((1, 0, 0), (3, 5, 6)), Box((1, 2, 0), (3, 4, 6)),
        Box((2, 1, 3), (3, 2, 6)), Box((0, 1, 2), (4, 5, 3)),
    ],
)  # fmt: skip
def test_positions_of_a_box_are_those_of_the_tensor(box) -> None:
    shape = (4, 5, 6)
    everything = torch.arange(120).view(shape)[box.slices].reshape(-1)
    assert torch.equal(positions_in_whole(torch.arange(box.numel), box, shape), everything)


class Writes(TorchDispatchMode):
    """Elements written into the storage of given tensors, by any op."""

    def __init__(self, tensors) -> None:
        super().__init__()
        self._storages = {t.untyped_storage().data_ptr() for t in tensors}
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        schema = func._schema
        for spec, arg in zip(schema.arguments, args, strict=False):
            written = spec.alias_info is not None and spec.alias_info.is_write
            if written and arg.untyped_storage().data_ptr() in self._storages:
                sizes = [a.numel() for a in args[1:] if isinstance(a, torch.Tensor)]
                lists = [a for a in args[1:] if isinstance(a, list | tuple)]
                sizes += [a.numel() for one in lists for a in one if isinstance(a, torch.Tensor)]
                self.count += max(sizes, default=arg.numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["plain", "tiles"])
def test_changes_are_applied_in_as_many_writes(checkpoints, layout) -> None:
    engine = Engine(checkpoints[0], 1, checkpoints[1], layout)
    try:
        instances = engine.ranks[0].instances
        load = instances.open_shadow(True)
        assert instances._shadow is not None
        storages = [p.data for p in instances._shadow.parameters()]
        weights = nudged(checkpoints[1], 0.01)
        patches, changed = [], 0
        for name, tensor in weights.items():
            found = diff_update(checkpoints[1][name].clone(), tensor, tensor.numel())
            assert found is not None
            changed += len(found[0])
            patches.append((name, SparsePatch(tuple(tensor.shape), tensor.dtype, *found)))
        with Writes(storages) as writes:
            load.feed(patches)
        assert 0 < changed <= writes.count <= 2 * changed
        load.finish()
        instances.commit()
        assert same(engine.live(), fresh(engine, checkpoints, layout, weights))
    finally:
        engine.close()
