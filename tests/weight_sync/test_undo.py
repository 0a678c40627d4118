"""Going back: bit for bit, by the shadow, by what differs, or by a copy in host memory."""

from __future__ import annotations

import threading

import pytest
import torch
from engine_ranks import Engine, same
from manual_update import ManualUpdate

from rollout.config import EngineConfig
from rollout.engine.memory_plan import KVSize, plan_memory, size_kv
from rollout.engine.worker.rollback import RollbackSnapshot
from rollout.errors import (
    ChecksumMismatch,
    ConfigError,
    EngineBroken,
    EngineClosed,
    RolloutError,
    SourceFailed,
    VersionConflict,
)
from rollout.models.build import build_model
from rollout.weight_sync.protocol.committed import DeltaBase
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.publisher import publish
from rollout.weight_sync.trainer.weight_report import check_weights

DEADLINE = 5.0
UNDO = ("shadow", "sparse", "host")


@pytest.fixture(params=[1, 2])
def tp(request):
    return request.param


@pytest.fixture
def make(checkpoints, tp):
    config, old, _ = checkpoints
    made = []

    def build(undo: str) -> Engine:
        made.append(Engine(config, tp, old, "tiles", undo))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def update(engine, weights, **options):
    options = UpdateOptions(bucket_bytes=32 << 10, timeout=DEADLINE, **options)
    return publish(weights, connect=lambda: engine, options=options)


def half_sent(engine, weights, **request) -> None:
    """An update that is given up after it has overwritten half of what it stages in."""
    hand = ManualUpdate(engine, weights, **request)
    hand.begin()
    for _ in range(len(hand.buckets) // 2):
        hand.bucket()
    hand.channel.abort("given up")


def nudged(weights, share=0.01, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.where(torch.rand(t.shape, generator=generator) < share, t + 0.5, t)
        for n, t in weights.items()
    }


@pytest.mark.parametrize("undo", UNDO)
def test_every_way_goes_back_bit_for_bit_while_versions_rise(make, checkpoints, undo) -> None:
    engine = make(undo)
    before = engine.live()
    update(engine, checkpoints[2])
    receipt = engine.rollback(DEADLINE)
    assert receipt.version == engine.version == 2
    assert same(engine.live(), before)
    with pytest.raises(VersionConflict, match="no predecessor"):
        engine.rollback(DEADLINE)
    after = update(engine, checkpoints[2])
    assert after.version == 3
    assert engine.rollback(DEADLINE).digest == receipt.digest


@pytest.mark.parametrize("undo", UNDO)
def test_an_aborted_update_takes_the_way_back_with_it_only_from_the_shadow(
    make, checkpoints, undo
) -> None:
    engine = make(undo)
    first = update(engine, checkpoints[2])
    before = engine.live()
    update(engine, nudged(checkpoints[2]))
    half_sent(engine, checkpoints[1])
    half_sent(engine, checkpoints[2])
    if undo == "shadow":
        with pytest.raises(VersionConflict, match="until the next update begins"):
            engine.rollback(DEADLINE)
        return
    live = engine.live()
    receipt = engine.rollback(DEADLINE)
    assert (receipt.version, receipt.digest) == (3, first.digest)
    assert same(engine.live(), before)
    assert not same(live, before)
    update(engine, checkpoints[1])  # and the shadow can still be staged in
    assert check_weights(checkpoints[1], connect=lambda: engine, timeout=DEADLINE).equal


@pytest.mark.parametrize("undo", ["sparse", "host"])
def test_without_staging_a_failed_update_brings_the_old_version_back(
    make, checkpoints, undo
) -> None:
    engine = make(undo)
    _, _, new = checkpoints
    update(engine, new, staging="none")
    before = engine.live()
    for staged in (False, True):
        if staged:  # also where a shadow was there meanwhile
            update(engine, checkpoints[1])
            before = engine.live()
        half_sent(engine, nudged(new), staging="none")
        assert (engine.broken, engine.held, engine.info().state) == (None, False, "idle")
        assert same(engine.live(), before)
        with pytest.raises(VersionConflict, match="no predecessor"):
            engine.rollback(DEADLINE)


def test_without_staging_nothing_kept_is_broken(make, checkpoints) -> None:
    engine = make("shadow")
    half_sent(engine, checkpoints[2], staging="none")
    assert engine.broken == "an update without staging failed midway: given up"
    with pytest.raises(EngineBroken):
        update(engine, {"model.norm.weight": checkpoints[2]["model.norm.weight"]}, partial=True)


@pytest.mark.parametrize("undo", ["sparse", "host"])
def test_without_staging_a_committed_update_can_be_rolled_back(make, checkpoints, undo) -> None:
    engine = make(undo)
    before = engine.live()
    update(engine, nudged(checkpoints[1]), staging="none")
    assert not any(rank.instances.has_shadow for rank in engine.ranks)
    kept = [rank.instances.kept_bytes for rank in engine.ranks]
    engine.rollback(DEADLINE)
    assert same(engine.live(), before)
    whole = [weight_bytes(rank) for rank in engine.ranks]
    share = 0.05 if undo == "sparse" else 1.0  # the changed hundredth, with its positions
    assert all(k <= share * w for k, w in zip(kept, whole, strict=True))


@pytest.mark.parametrize("staging", ["auto", "none"])
@pytest.mark.parametrize("undo", UNDO)
@pytest.mark.parametrize("failing", [0, -1])
def test_a_commit_that_fails_on_any_rank_leaves_all_where_they_were(
    make, checkpoints, undo, staging, failing
) -> None:
    engine = make(undo)
    update(engine, checkpoints[2])
    before = engine.live()
    engine.ranks[failing].fail_commit = True
    with pytest.raises((RuntimeError, RolloutError)):
        update(engine, checkpoints[1], staging=staging)
    engine.ranks[failing].fail_commit = False
    if staging == "none" and undo == "shadow":
        assert engine.broken
        return
    assert engine.broken is None
    assert same(engine.live(), before)
    assert [rank.version for rank in engine.ranks] == [1] * len(engine.ranks)
    assert update(engine, checkpoints[1]).version == 2


@pytest.mark.parametrize("undo", ["sparse", "host"])
def test_a_rollback_that_fails_on_one_rank_leaves_all_where_they_were(
    make, checkpoints, undo
) -> None:
    engine = make(undo)
    old = engine.live()
    update(engine, checkpoints[2])
    half_sent(engine, checkpoints[1])
    before = engine.live()
    engine.ranks[-1].fail_commit = True
    with pytest.raises((RuntimeError, RolloutError)):
        engine.rollback(DEADLINE)
    assert same(engine.live(), before)
    engine.ranks[-1].fail_commit = False
    engine.rollback(DEADLINE)
    assert same(engine.live(), old)


def test_of_a_delta_the_overwritten_values_alone_are_kept(make, checkpoints) -> None:
    engine = make("sparse")
    base = DeltaBase()
    options = UpdateOptions(bucket_bytes=32 << 10, timeout=DEADLINE, encoding="delta")
    publish(checkpoints[1], connect=lambda: engine, options=options, base=base)
    before = engine.live()
    sent = nudged(checkpoints[1])
    receipt = publish(sent, connect=lambda: engine, options=options, base=base)
    assert receipt.details["encoding"] == "delta"
    half_sent(engine, checkpoints[2])
    for rank in engine.ranks:
        assert 0 < rank.instances.kept_bytes < 0.05 * weight_bytes(rank)
    engine.rollback(DEADLINE)
    assert same(engine.live(), before)


def test_a_source_that_fails_while_it_overwrites_the_live_weights_changes_nothing(
    make, checkpoints
) -> None:
    engine = make("host")
    before = engine.live()

    def raises():
        for index, item in enumerate(checkpoints[2].items()):
            if index == 5:
                raise OSError("the disk is gone")
            yield item

    with pytest.raises(SourceFailed):
        update(engine, raises(), staging="none")
    assert engine.broken is None
    assert same(engine.live(), before)


def test_an_exchange_that_fails_midway_puts_back_what_it_changed(make, checkpoints) -> None:
    engine = make("shadow")
    live = engine.ranks[0].instances.live
    before = engine.live()
    kept = RollbackSnapshot.whole(live)
    for piece in kept._pieces:
        piece.values += 1
    kept._pieces[-1].values = kept._pieces[-1].values[:1].expand(3)  # does not fit
    with pytest.raises(RuntimeError):
        kept.exchange(live)
    assert same(engine.live(), before)


def test_contents_are_exchanged_with_a_shadow_elsewhere(checkpoints) -> None:
    """cpu:0 stands for another device than cpu: the live instance keeps its addresses."""
    config, old, new = checkpoints
    engine = Engine(config, 2, old)
    try:
        for rank in engine.ranks:
            tp = rank.instances.live.tp
            rank.instances._shadow_device = torch.device("cpu:0")
            rank.instances._build = lambda device, tp=tp: build_model(
                config, tp, torch.float32, device
            )
        before = engine.live()
        places = [[p.data_ptr() for p in r.instances.live.parameters()] for r in engine.ranks]
        update(engine, new)
        assert check_weights(new, connect=lambda: engine, timeout=DEADLINE).equal
        engine.rollback(DEADLINE)
        assert same(engine.live(), before)
        now = [[p.data_ptr() for p in r.instances.live.parameters()] for r in engine.ranks]
        assert now == places
        update(engine, new, staging="device")  # this one's shadow lies beside the live instance
        assert check_weights(new, connect=lambda: engine, timeout=DEADLINE).equal
        now = [[p.data_ptr() for p in r.instances.live.parameters()] for r in engine.ranks]
        assert now != places
        engine.rollback(DEADLINE)
        assert same(engine.live(), before)
    finally:
        engine.close()


@pytest.mark.parametrize("staging", ["host", "device"])
def test_an_update_says_where_it_is_staged(make, checkpoints, staging) -> None:
    engine = make("shadow")
    before = engine.live()
    update(engine, checkpoints[2], staging=staging)
    assert check_weights(checkpoints[2], connect=lambda: engine, timeout=DEADLINE).equal
    engine.rollback(DEADLINE)
    assert same(engine.live(), before)
    with pytest.raises(ConfigError, match="staging must be one of"):
        ManualUpdate(engine, checkpoints[1], staging="elsewhere").begin()


def test_what_undo_takes_is_planned_and_refused_where_it_does_not_fit() -> None:
    mib = 1 << 20
    cpu = {"device": "cpu", "weight_bytes": 10 * mib, "kv_block_bytes": mib, "free_bytes": 59 * mib}
    gpu = {**cpu, "device": "cuda:0", "host_free_bytes": 19 * mib}

    def config(undo, staging="auto"):
        return EngineConfig(
            model="m", undo=undo, staging=staging, num_kv_blocks=4, max_model_len=8,
            tensor_parallel_size=2,
        )  # fmt: skip

    for undo in UNDO:
        size_kv(config(undo), 64, [cpu, cpu])
    small = {**cpu, "free_bytes": 39 * mib}
    size_kv(config("shadow"), 64, [small, small])
    size_kv(config("host", "none"), 64, [small, small])
    for undo in ("sparse", "host"):
        with pytest.raises(ConfigError, match=r"undo='\w+': it may need 10.0 MiB per rank"):
            size_kv(config(undo), 64, [small, small])
        with pytest.raises(ConfigError, match=r"9.5 MiB of host memory are free"):
            size_kv(config(undo), 64, [gpu, gpu])
    with pytest.raises(ConfigError, match="staging='host'"):
        size_kv(config("shadow", "host"), 64, [gpu, gpu])
    plan = plan_memory(config("host"), KVSize(4, 64), [cpu, cpu])
    assert plan.to_dict() == {
        "weights": 10 * mib, "staging": 10 * mib, "undo": 10 * mib, "kv": 4 * mib
    }  # fmt: skip
    assert "undo='host' takes 10.0 MiB of host memory at most" in str(plan)
    assert "undo='shadow' takes nothing more" in str(
        plan_memory(config("shadow"), KVSize(4, 64), [cpu])
    )


def weight_bytes(rank) -> int:
    return sum(p.nbytes for p in rank.instances.live.parameters())


# ---- what goes live is what was proven ----


@pytest.fixture
def exchanging(checkpoints, tp):
    """Commits exchange contents, as they do under captured graphs."""
    engine = Engine(checkpoints[0], tp, checkpoints[1], "tiles", pinned=True)
    yield engine
    engine.close()


def damaging(rank) -> None:
    """Make the next commit of ``rank`` leave one wrong bit in what went live."""
    honest = rank.commit

    def commit(args, tensors):
        reply = honest(args, tensors)
        rank.commit = honest
        parameter = next(rank.instances.live.parameters())
        parameter.data.view(torch.int32).view(-1)[7] ^= 1
        return reply

    rank.commit = commit


def test_contents_that_a_commit_moved_are_read_again_before_a_step(exchanging, checkpoints) -> None:
    engine, before = exchanging, exchanging.live()
    damaging(engine.ranks[-1])
    with pytest.raises(ChecksumMismatch, match=r"1 of \d+ tensors changed as they were made live"):
        update(engine, checkpoints[2])
    assert (engine.version, engine.broken, engine.committed) == (0, None, [])
    assert same(engine.live(), before)
    read = [rank.read for rank in engine.ranks]
    assert update(engine, checkpoints[2]).version == 1
    assert [rank.read for rank in engine.ranks] == [n + 1 for n in read]
    assert check_weights(checkpoints[2], connect=lambda: engine, timeout=DEADLINE).equal


def test_a_rank_that_fails_once_it_has_moved_bytes_is_read_again(exchanging, checkpoints) -> None:
    """Nobody says how far it came: that all ranks are back where they were has to be seen."""
    engine = exchanging
    update(engine, checkpoints[2])
    rank = engine.ranks[-1]
    honest = rank.commit

    def commit(args, tensors):
        honest(args, tensors)
        for instance in (rank.instances.live, rank.instances._shadow):
            parameter = next(instance.parameters())
            parameter.data.view(torch.int32).view(-1)[7] ^= 1
        raise RuntimeError("the rank failed after it had moved bytes")

    rank.commit = commit
    with pytest.raises(EngineBroken, match="going back failed: 1 of"):
        update(engine, checkpoints[1])
    assert (engine.version, engine.info().state) == (1, "broken")
    rank.commit = honest
    assert update(engine, checkpoints[1]).version == 2
    assert check_weights(checkpoints[1], connect=lambda: engine, timeout=DEADLINE).equal


def test_a_commit_that_moves_nothing_reads_nothing(make, checkpoints) -> None:
    engine = make("shadow")
    update(engine, checkpoints[2])
    update(engine, checkpoints[1], staging="none")
    assert [rank.read for rank in engine.ranks] == [0] * len(engine.ranks)


@pytest.mark.parametrize("undo", UNDO)
def test_a_rollback_to_damaged_weights_is_taken_back(make, checkpoints, undo) -> None:
    engine = make(undo)
    update(engine, checkpoints[1])
    update(engine, checkpoints[2])
    damaging(engine.ranks[-1])
    with pytest.raises(ChecksumMismatch, match="changed as they were made live"):
        engine.rollback(DEADLINE)
    assert (engine.version, engine.broken, engine.info().state) == (2, None, "idle")
    assert check_weights(checkpoints[2], connect=lambda: engine, timeout=DEADLINE).equal
    assert update(engine, checkpoints[1]).version == 3


def test_no_number_is_given_to_two_contents(make, checkpoints) -> None:
    """Whatever becomes of an update: a number that was seen belongs to one set of weights."""
    engine = make("shadow")
    seen: dict[int, set[int]] = {}

    def look() -> None:
        if engine.broken is None:
            held = sum(engine.digests(DEADLINE).values()) % 2**64
            seen.setdefault(engine.version, set()).add(held)

    look()
    engine.ranks[-1].fail_commit = True
    with pytest.raises(RolloutError, match="made to fail"):
        update(engine, checkpoints[2])
    look()
    engine.ranks[-1].fail_commit = False
    update(engine, nudged(checkpoints[2]))
    look()
    engine.rollback(DEADLINE)
    look()
    half_sent(engine, checkpoints[2], staging="none")
    assert engine.broken
    look()
    update(engine, checkpoints[2])
    look()
    assert sorted(seen) == [0, 1, 2, 3]
    assert all(len(contents) == 1 for contents in seen.values()), seen
    assert [version for version, _ in engine.committed] == [1, 2, 3]


def test_a_second_rollback_says_who_calls_it(make, checkpoints) -> None:
    engine = make("shadow")
    update(engine, checkpoints[2])
    engine.rollback(DEADLINE)
    with pytest.raises(VersionConflict, match=r"is a rollback already.*on one of them alone"):
        engine.rollback(DEADLINE)


def test_weights_are_not_put_aside_while_they_are_read(make, checkpoints) -> None:
    """``sleep`` on a GPU beside a comparison; here the device is only said to be one."""
    instances = make("shadow").ranks[0].instances
    instances._device = torch.device("cuda")
    model, reading, go_on = instances.live, threading.Event(), threading.Event()
    honest = model.digest_slot

    def slow(slot, nonfinite=None):
        reading.set()
        assert go_on.wait(30)
        return honest(slot, nonfinite)

    model.digest_slot = slow
    failures, parked = [], threading.Event()

    def read() -> None:
        try:
            for _ in instances.reader.digest_slots(live=True):
                assert parked.wait(30)
        except EngineClosed as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert reading.wait(30)
    parking = threading.Thread(target=lambda: (instances.park(), parked.set()))
    parking.start()
    parking.join(0.1)
    assert parking.is_alive()  # it waits for the slot that is read
    go_on.set()
    parking.join(30)
    reader.join(30)
    assert not parking.is_alive()
    assert "wake_up" in str(failures[0])
