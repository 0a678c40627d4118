"""An update happens as a whole on every rank, or nothing changes, whatever goes wrong."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from engine_ranks import Engine, same
from tiny_models import write_tiny

from rollout.errors import (
    ChecksumMismatch,
    ConfigError,
    DeadlineExceeded,
    EngineBroken,
    EngineError,
    IncompleteUpdate,
    RolloutError,
    SourceFailed,
    TransferFailed,
    UpdateInProgress,
    VersionConflict,
    WeightMismatch,
    WorkerDied,
)
from rollout.models.config.model import ModelConfig
from rollout.testing.faults import Fault, Faulty
from rollout.weight_sync.protocol.bucket_packer import BucketPacker
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.trainer.weight_report import check_weights, preflight
from rollout.weights import Box

BUCKET = 16 << 10  # the tiny model then takes well over 8 buckets
DEADLINE = 3.0


def file_form(model) -> dict[str, torch.Tensor]:
    tied = model.config.tie_word_embeddings
    return {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


@pytest.fixture(scope="module", params=["plain", "tiles"])
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    where = tmp_path_factory.mktemp("models")
    old = write_tiny(where / "old", "qwen3", tied=True, seed=0)
    new = write_tiny(where / "new", "qwen3", tied=True, seed=1)
    config = ModelConfig.from_directory(where / "old")
    return config, file_form(old), file_form(new)


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def engine(request, checkpoints, layout):
    config, old, _ = checkpoints
    engine = Engine(config, request.param, old, layout)
    yield engine
    engine.close()


@pytest.fixture
def new(checkpoints):
    return dict(checkpoints[2])


def update(engine, source, **options):
    options = {"bucket_bytes": BUCKET, "timeout": DEADLINE, **options}
    return publish(source, connect=lambda: engine, options=UpdateOptions(**options))


def fresh(engine, checkpoints, weights, layout):
    other = Engine(checkpoints[0], len(engine.ranks), weights, layout)
    try:
        return other.live()
    finally:
        other.close()


@pytest.mark.parametrize("transport", ["inline", "broadcast"])
def test_a_live_update_equals_a_fresh_start(engine, new, checkpoints, layout, transport) -> None:
    addresses = [
        {n: p.data_ptr() for n, p in r.instances.live.named_parameters()} for r in engine.ranks
    ]
    receipt = update(engine, new, transport=transport, label="step-1")
    assert same(engine.live(), fresh(engine, checkpoints, new, layout))
    assert (receipt.version, receipt.transport, receipt.label) == (1, transport, "step-1")
    assert receipt.num_bytes == sum(t.nbytes for t in new.values())
    assert len(receipt.ranks) == len(engine.ranks)
    assert set(receipt.timings) == {
        "gather", "transfer", "stage", "verify", "commit", "stall", "total",
    }  # fmt: skip
    update(engine, checkpoints[1], transport=transport)
    again = [
        {n: p.data_ptr() for n, p in r.instances.live.named_parameters()} for r in engine.ranks
    ]
    assert again == addresses  # two swaps: the same instance is live again, where it was
    assert same(engine.live(), fresh(engine, checkpoints, checkpoints[1], layout))


def test_the_digest_of_the_receipt_is_the_digest_of_what_is_live(engine, new) -> None:
    receipt = update(engine, new)
    held = engine.digests(DEADLINE)
    assert sum(held.values()) % 2**64 == receipt.digest
    assert check_weights(new, connect=lambda: engine, timeout=DEADLINE).equal


def test_check_weights_names_the_tensor_with_one_flipped_bit(engine, new) -> None:
    update(engine, new)
    name = "model.layers.1.mlp.down_proj.weight"
    new[name] = new[name].clone()
    new[name].view(torch.int32)[5, 7] ^= 1
    assert check_weights(new, connect=lambda: engine, timeout=DEADLINE).differing == (name,)


def broken_sources(new):
    def raising():
        for index, item in enumerate(new.items()):
            if index == 9:
                raise OSError("the disk went away")
            yield item

    name = "model.layers.0.mlp.up_proj.weight"
    swapped = {**new, name: new[name].T.contiguous()}
    without = {n: t for n, t in new.items() if n != name}
    return {
        "raises": (raising, SourceFailed, "the disk went away"),
        "misses": (lambda: iter(without.items()), (WeightMismatch, IncompleteUpdate), name),
        "misses, known before": (lambda: without, WeightMismatch, name),
        "adds": (lambda: iter([*new.items(), ("model.extra", torch.ones(2))]), WeightMismatch,
                 "model.extra"),
        "repeats": (lambda: iter([*new.items(), (name, new[name])]), WeightMismatch, name),
        "misshapes": (lambda: iter(swapped.items()), WeightMismatch, name),
        "sends integers": (lambda: iter({**new, name: new[name].to(torch.int64)}.items()),
                           WeightMismatch, name),
        "is empty": (lambda: iter(()), RolloutError, "no tensor|nothing|missing|not initialized"),
    }  # fmt: skip


KINDS = ["raises", "misses", "misses, known before", "adds", "repeats", "misshapes",
         "sends integers", "is empty"]  # fmt: skip


@pytest.mark.parametrize("transport", ["inline", "broadcast"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_source_changes_nothing(engine, new, checkpoints, kind, transport) -> None:
    before = engine.live()
    source, error, text = broken_sources(new)[kind]
    started = time.monotonic()
    with pytest.raises(error, match=text):
        update(engine, source(), transport=transport)
    assert time.monotonic() - started < 25
    assert same(engine.live(), before)
    assert engine.info().state == "idle"
    assert engine.version == 0
    assert update(engine, new, transport=transport).version == 1


def test_the_trainers_own_exception_is_the_cause(engine, new) -> None:
    with pytest.raises(SourceFailed) as caught:
        update(engine, broken_sources(new)["raises"][0]())
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("transport", ["inline", "broadcast"])
@pytest.mark.parametrize("bucket", [0, 4, 8])
def test_one_flipped_bit_is_refused_by_name(engine, new, checkpoints, transport, bucket) -> None:
    before = engine.live()
    fault = Faulty(transport, Fault("flip", bucket=bucket, bit=1003))
    with pytest.raises(ChecksumMismatch, match=r"1 of \d+ tensors arrived changed: model\."):
        update(engine, new, transport=fault)
    assert same(engine.live(), before)
    assert update(engine, new, transport=transport).version == 1


@pytest.mark.parametrize("transport", ["inline", "broadcast"])
@pytest.mark.parametrize("bucket", [5, -1])
def test_a_lost_bucket_is_a_named_error_in_time(engine, new, transport, bucket) -> None:
    before = engine.live()
    if bucket < 0:  # the last one: nothing follows that could betray the gap
        bucket += count_buckets(new)
    started = time.monotonic()
    with pytest.raises((TransferFailed, IncompleteUpdate, DeadlineExceeded), match=r"bucket"):
        update(engine, new, transport=Faulty(transport, Fault("drop", bucket=bucket)), timeout=1.0)
    assert time.monotonic() - started < 25
    assert same(engine.live(), before)
    assert update(engine, new, transport=transport).version == 1


def count_buckets(weights) -> int:
    packer = BucketPacker(BUCKET)
    for name, tensor in weights.items():
        list(packer.add(name, tensor))
    list(packer.flush())
    assert packer.num_buckets >= 8
    return packer.num_buckets


def test_a_delay_below_the_deadline_is_no_error(engine, new) -> None:
    slow = Faulty("broadcast", Fault("delay", bucket=2, seconds=0.3))
    assert update(engine, new, transport=slow).version == 1


def test_a_source_that_stalls_frees_the_engine_at_the_deadline(engine, new) -> None:
    freed = []

    def stalling():
        for index, item in enumerate(new.items()):
            if index == 6:
                time.sleep(1.6)
                freed.append(engine.info().state)
            yield item

    before = engine.live()
    with pytest.raises(DeadlineExceeded, match=r"did not yield within 0.8 s after tensor 'model"):
        update(engine, stalling(), timeout=0.8)
    assert freed == ["idle"]
    assert same(engine.live(), before)


def test_an_update_whose_channel_closes_is_aborted_at_once(engine, new) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow():
        for index, item in enumerate(new.items()):
            if index == 12:
                entered.set()
                leave.wait(60)
            yield item

    failures = []

    def background():
        try:
            update(engine, slow())
        except RolloutError as error:
            failures.append(error)

    thread = threading.Thread(target=background)
    thread.start()
    assert entered.wait(30)
    with pytest.raises(UpdateInProgress):
        update(engine, new, timeout=0.3)
    engine.coordinator.turn.holder.close()
    assert update(engine, new).version == 1
    leave.set()
    thread.join(30)
    assert isinstance(failures[0], TransferFailed)
    assert engine.version == 1


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_version_that_does_not_rise_is_refused(engine, new, version) -> None:
    update(engine, new, version=3)
    with pytest.raises(VersionConflict, match="not above the live version 3"):
        update(engine, new, version=version)
    assert update(engine, new, version=10).version == 10


def test_after_the_highest_version_that_may_be_named_others_follow(engine, new) -> None:
    most = 1 << 52
    with pytest.raises(ConfigError, match=f"at most {most}, or one above the live version 0"):
        update(engine, new, version=most + 1)
    assert update(engine, new, version=most).version == most
    assert update(engine, new).version == most + 1
    assert update(engine, new, version=most + 2).version == most + 2
    assert engine.rollback(DEADLINE).version == most + 3


def test_an_update_on_another_base_is_refused(engine) -> None:
    from rollout.weight_sync.protocol.messages import UpdateRequest

    request = UpdateRequest(update_id="x", base=(7, 5), bucket_bytes=BUCKET, timeout=DEADLINE)
    with pytest.raises(VersionConflict, match="built on"):
        engine.open().begin(request)
    assert engine.info().state == "idle"


def test_a_failing_commit_brings_every_rank_back(engine, new) -> None:
    before = engine.live()
    engine.ranks[-1].fail_commit = True
    with pytest.raises((RuntimeError, EngineError)):
        update(engine, new)
    assert same(engine.live(), before)
    assert engine.version == 0
    assert engine.broken is None
    assert all(rank.version == 0 for rank in engine.ranks)
    engine.ranks[-1].fail_commit = False
    assert update(engine, new).version == 1


def test_a_rank_that_dies_at_a_commit_is_said_to_have_died(engine, new, monkeypatch) -> None:
    def dead(args, tensors):
        raise WorkerDied("rank 0 ended by signal SIGKILL")

    for method in ("commit", "revert"):
        monkeypatch.setattr(engine.ranks[0], method, dead)
    with pytest.raises(WorkerDied, match="rank 0 ended by signal SIGKILL"):
        update(engine, new)
    assert engine.broken is None  # that says what mends it


def test_whatever_fails_inside_a_commit_brings_every_rank_back(engine, new) -> None:
    before, honest = engine.live(), engine.on_commit

    def raising(version, in_flight, pin, **_):
        raise ValueError("no such mode")

    engine.on_commit = raising
    with pytest.raises(EngineError, match="no such mode"):
        update(engine, new)
    assert same(engine.live(), before)
    assert (engine.version, engine.broken, engine.info().state) == (0, None, "idle")
    assert all(rank.version == 0 for rank in engine.ranks)
    engine.on_commit = honest
    assert update(engine, new).version == 1
    engine.on_commit = raising
    with pytest.raises(ValueError, match="no such mode"):
        engine.rollback(DEADLINE)
    assert (engine.version, engine.broken) == (1, None)
    assert check_weights(new, connect=lambda: engine, timeout=DEADLINE).equal


def test_what_fails_once_it_is_live_leaves_the_next_update_free_to_begin(
    engine, new, monkeypatch
) -> None:
    def failing(*_, **__):
        raise KeyError("a book")

    with monkeypatch.context() as patch:
        patch.setattr(engine.coordinator, "record", failing)
        with pytest.raises(Exception, match="a book"):
            update(engine, new)
    assert (engine.version, engine.info().state) == (1, "idle")
    assert update(engine, new).version == 2


def test_an_unknown_way_for_running_requests_is_refused_before_anything_is_staged(
    engine, new
) -> None:
    from rollout.weight_sync.protocol.messages import UpdateRequest

    update(engine, new)
    request = UpdateRequest(update_id="x", in_flight="bogus", bucket_bytes=BUCKET, timeout=DEADLINE)
    with pytest.raises(ConfigError, match="in_flight must be one of"):
        engine.open().begin(request)
    assert engine.rollback(DEADLINE).version == 2


def test_a_rollback_is_bit_identical_and_moves_forward(engine, new) -> None:
    before = engine.live()
    update(engine, new)
    receipt = engine.rollback(DEADLINE)
    assert receipt.version == 2
    assert same(engine.live(), before)
    with pytest.raises(VersionConflict, match="no predecessor"):
        engine.rollback(DEADLINE)


def test_a_partial_update_leaves_the_rest_as_it_was(engine, new, checkpoints, layout) -> None:
    names = [n for n in new if "layers.1" in n]
    receipt = update(engine, {n: new[n] for n in names}, partial=True)
    assert receipt.num_tensors == len(names)
    mixed = {n: new[n] if n in names else t for n, t in checkpoints[1].items()}
    assert same(engine.live(), fresh(engine, checkpoints, mixed, layout))


def test_without_staging_a_failure_breaks_the_engine_until_a_full_update(engine, new) -> None:
    with pytest.raises(SourceFailed):
        update(engine, broken_sources(new)["raises"][0](), staging="none")
    assert engine.broken is not None
    assert not engine.held
    with pytest.raises(EngineBroken, match="full update"):
        update(engine, {n: t for n, t in new.items() if "layers.1" in n}, partial=True)
    update(engine, new, staging="none")
    assert engine.broken is None
    assert check_weights(new, connect=lambda: engine, timeout=DEADLINE).equal


def test_preflight_names_every_difference_and_moves_nothing(engine, new) -> None:
    name = "model.norm.weight"
    new["model.layers.0.mlp.up_proj.bias"] = torch.ones(3)
    new[name] = torch.ones(7)
    del new["model.embed_tokens.weight"]
    report = preflight(new, connect=lambda: engine, timeout=DEADLINE)
    text = "\n".join(report.problems)
    assert "up_proj.bias is unknown" in text
    assert f"{name} has shape (7,)" in text
    assert "model.embed_tokens.weight is missing" in text
    assert engine.info().state == "idle"


def test_half_precision_masters_are_cast_once_by_the_sender(engine, new) -> None:
    doubles = {name: tensor.double() for name, tensor in new.items()}
    receipt = update(engine, doubles)
    assert receipt.num_bytes == sum(t.nbytes for t in new.values())
    assert check_weights(new, connect=lambda: engine, timeout=DEADLINE).equal


def test_a_tied_head_may_be_sent_and_must_equal_its_owner(engine, new) -> None:
    owner = "model.embed_tokens.weight"
    assert update(engine, iter([*new.items(), ("lm_head.weight", new[owner])])).version == 1
    with pytest.raises(WeightMismatch, match=r"lm_head\.weight"):
        update(engine, iter([*new.items(), ("lm_head.weight", new[owner] + 1)]))
    assert engine.version == 1


def test_boxes_of_one_tensor_cross_buckets(engine, new) -> None:
    receipt = update(engine, new, bucket_bytes=4 << 10)
    assert receipt.version == 1
    assert Box.full((2, 2)).numel == 4
    assert check_weights(new, connect=lambda: engine, timeout=DEADLINE).equal


class OwnSource:
    """A trainer's own source that raises in one of its methods."""

    def __init__(self, where: str) -> None:
        from rollout.weight_sync.agreement import Agreement

        self.agreement, self._where = Agreement(), where

    def metadata(self):
        if self._where == "metadata":
            raise KeyError("no such shard")

    def local_boxes(self):
        return []

    def __iter__(self):
        if self._where == "iter":
            raise KeyError("no such shard")
        return iter(())


@pytest.mark.parametrize("where", ["metadata", "iter"])
def test_a_source_of_ones_own_that_raises_anywhere_is_named(engine, where) -> None:
    with pytest.raises(SourceFailed, match="KeyError: 'no such shard'"):
        update(engine, OwnSource(where))
    assert engine.info().state == "idle"


@pytest.mark.parametrize(
    "item",
    [
        7,
        ("x", [1, 2]),
        ("x",),
    ],
    ids=["int", "list", "one"],
)
def test_what_is_no_named_tensor_is_refused_as_the_sources_fault(engine, item) -> None:
    with pytest.raises(SourceFailed):
        update(engine, iter([item]))
    assert engine.info().state == "idle"


@pytest.mark.parametrize("tensor", [torch.ones(2, device="meta"), torch.eye(2).to_sparse()])
def test_a_tensor_that_holds_no_dense_values_is_refused_by_name(engine, tensor) -> None:
    with pytest.raises(WeightMismatch, match="x is "):
        update(engine, iter([("x", tensor)]))
    assert engine.info().state == "idle"


def test_waiting_for_requests_comes_before_holding_their_steps(engine, new) -> None:
    update(engine, new, staging="none", in_flight="wait")
    assert engine.gates == ["drain", "hold", "release", "undrain"]
    engine.gates.clear()
    update(engine, new, in_flight="wait")
    assert engine.gates == ["drain", "undrain"]


def test_a_reading_that_a_commit_fell_into_is_done_again(engine, new) -> None:
    read = []
    honest = engine.ranks[-1].stage_digests

    def torn(args, tensors):
        reply = honest(args, tensors)
        read.append(1)
        if len(read) == 1:
            reply["versions"] = [0, 1]
        return reply

    engine.ranks[-1].stage_digests = torn
    update(engine, new)
    read.clear()
    assert check_weights(new, connect=lambda: engine, timeout=DEADLINE).equal
    assert len(read) == 2


def test_a_check_says_which_version_it_compared_with(engine, new) -> None:
    def source():
        for index, item in enumerate(new.items()):
            if index == 3:
                update(engine, new)
            yield item

    report = check_weights(source(), connect=lambda: engine, timeout=DEADLINE)
    assert report.equal
    assert report.version == engine.info().version == 1


class LosesTheReply:
    """A link whose commit happens, late, after its reply was lost."""

    def __init__(self, engine, commits: bool) -> None:
        self._engine, self._commits = engine, commits
        self.local_address, self.info = engine.local_address, engine.info
        self.receipts = engine.receipts

    def open(self):
        lease = self._engine.open()
        honest = lease.commit

        def commit():
            if not self._commits:
                lease.close()
                raise TransferFailed("the link broke")
            self._engine.coordinator.turn.advance(lease, "committing")
            threading.Timer(0.3, honest).start()
            raise TransferFailed("the link broke")

        lease.commit = commit
        lease.close = lambda: None if self._commits else type(lease).close(lease)
        return lease


def test_a_lost_reply_is_answered_by_the_engines_own_receipt(engine, new) -> None:
    link = LosesTheReply(engine, commits=True)
    options = UpdateOptions(bucket_bytes=BUCKET, timeout=DEADLINE)
    receipt = publish(new, connect=lambda: link, options=options)
    assert receipt.version == engine.version == 1
    assert "recovered" in receipt.details
    assert receipt.ranks == engine.receipts()[-1].ranks


def test_a_reply_lost_before_the_commit_is_a_failure(engine, new) -> None:
    link = LosesTheReply(engine, commits=False)
    options = UpdateOptions(bucket_bytes=BUCKET, timeout=DEADLINE)
    with pytest.raises(TransferFailed, match="the link broke"):
        publish(new, connect=lambda: link, options=options)
    assert engine.version == 0


def test_a_rollback_brings_the_label_back(engine, new, checkpoints) -> None:
    update(engine, new, label="good")
    update(engine, checkpoints[1], label="bad")
    assert engine.rollback(DEADLINE).label == "good"
    assert engine.info().label == "good"
    update(engine, checkpoints[1], label="worse")  # after a rollback, too
    engine.rollback(DEADLINE)
    assert engine.info().label == "good"


def test_a_rollback_brings_back_the_label_that_was_given_to_what_is_live(
    engine, new, checkpoints
) -> None:
    update(engine, new, label="first")
    engine.coordinator.relabel("renamed")
    update(engine, checkpoints[1], label="bad")
    engine.rollback(DEADLINE)
    assert engine.info().label == "renamed"


def test_a_rollback_never_brings_back_what_was_no_version(engine, new, checkpoints) -> None:
    with pytest.raises(SourceFailed):
        update(engine, broken_sources(new)["raises"][0](), staging="none")
    update(engine, checkpoints[1])
    with pytest.raises(VersionConflict, match="no predecessor"):
        engine.rollback(DEADLINE)
