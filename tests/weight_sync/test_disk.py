"""Versions in a store: what is read back is what was written, or a named error says what is not."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from engine_ranks import same
from trainer import BUCKET, DEADLINE, fresh, nudged
from trainer_ranks import CountedGathers, agreements

from rollout.errors import (
    ChecksumMismatch,
    ConfigError,
    IncompleteUpdate,
    SourceFailed,
    TransferFailed,
    VersionConflict,
)
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.versions.follower import Follower
from rollout.weight_sync.versions.reader import VersionSource, complete_versions
from rollout.weight_sync.versions.store import LocalStore
from rollout.weight_sync.versions.writer import VersionWriter


class PutGetList:
    """A store with nothing else: no rename, no append."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.order: list[str] = []

    def put(self, key: str, *parts: bytes | memoryview) -> None:
        self.objects[key] = b"".join(parts)
        self.order.append(key)

    def get(self, key: str) -> bytes:
        return self.objects[key]

    def list(self, prefix: str) -> list[str]:
        return [key for key in self.objects if key.startswith(prefix)]


@pytest.fixture(params=["objects", "directory"])
def store(request, tmp_path):
    return PutGetList() if request.param == "objects" else LocalStore(tmp_path / "store")


def writer(store, **options) -> VersionWriter:
    return VersionWriter(store, dtype=torch.float32, bucket_bytes=BUCKET, **options)


def read(store, version: int) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in VersionSource(store, version)}


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_version_comes_back_and_updates_an_engine(store, engine, checkpoints) -> None:
    writer(store).write(checkpoints[2], 12, label="step 12")
    assert complete_versions(store) == [12]
    assert equal(read(store, 12), checkpoints[2])
    receipt = publish(
        VersionSource(store, 12),
        connect=lambda: engine,
        options=UpdateOptions(version=12, timeout=DEADLINE, bucket_bytes=BUCKET),
    )
    assert receipt.version == 12
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))


def test_ranks_that_write_together_vote_after_buckets_of_the_first_rank(checkpoints) -> None:
    store = PutGetList()

    def write(link) -> object:
        return VersionWriter(store, dtype=torch.float32, bucket_bytes=BUCKET << link.rank).write(
            CountedGathers(checkpoints[2], link), 1, timeout=DEADLINE
        )

    with ThreadPoolExecutor(2) as pool:
        manifests = list(pool.map(write, agreements(2)))
    assert [manifest is None for manifest in manifests] == [False, True]
    assert equal(read(store, 1), checkpoints[2])


def test_the_manifest_is_written_last(checkpoints) -> None:
    store = PutGetList()
    writer(store).write(checkpoints[2], 1)
    assert [key.endswith("manifest.json") for key in store.order].index(True) + 1 == len(
        store.order
    )
    assert len(store.order) > 4


def test_changes_patch_forward_from_the_last_whole_version(store, checkpoints) -> None:
    write = writer(store, encoding="delta", anchor_every=3).write
    history = {v: nudged(checkpoints[2], 0.01 * v, v) for v in range(1, 6)}
    manifests = {version: write(weights, version) for version, weights in history.items()}
    assert [m.base for m in manifests.values()] == [None, 1, 2, None, 4]
    assert sum(manifests[2].buckets) < 0.2 * sum(manifests[1].buckets)  # headers included
    for version, weights in history.items():
        assert equal(read(store, version), weights)


def test_versions_of_fewer_tensors_or_another_order_are_read_as_they_were_written(
    store, checkpoints
) -> None:
    write = writer(store, encoding="delta").write
    whole = {v: nudged(checkpoints[1], 0.01, v) for v in range(6)}
    names = list(checkpoints[1])
    history = {
        1: whole[0],
        2: {name: whole[1][name] for name in names[3:7]},
        3: whole[2],
        4: {name: whole[3][name] for name in reversed(names)},
        5: {name: whole[4][name] for name in reversed(names)},
    }
    manifests = {version: write(weights, version) for version, weights in history.items()}
    assert [manifests[v].base for v in (1, 2, 3)] == [
        None,
        1,
        None,
    ]  # nothing is built on version 2
    for version, weights in history.items():
        assert equal(read(store, version), weights)


def test_a_failed_write_makes_the_next_version_whole(store, checkpoints) -> None:
    writing = writer(store, encoding="delta")
    writing.write(checkpoints[1], 1)

    def failing():
        yield from list(nudged(checkpoints[1], 0.01).items())[:5]
        raise OSError("gone")

    with pytest.raises(SourceFailed, match="gone"):
        writing.write(failing(), 2)
    assert complete_versions(store) == [1]
    assert writing.write(checkpoints[2], 2).base is None
    assert equal(read(store, 2), checkpoints[2])
    with pytest.raises(VersionConflict, match="written already: number on from"):
        writing.write(checkpoints[2], 2)


@pytest.mark.parametrize(
    ("made", "written", "text"),
    [
        ({"store": "versions"}, {}, "store must be one, such as LocalStore.*'versions'"),
        ({"dtype": "bfloat16"}, {}, "dtype must be .* such as torch.bfloat16, got 'bfloat16'"),
        ({"dtype": torch.int8}, {}, "plain floats, .*torch.int8"),
        ({"encoding": "delta", "anchor_every": "4"}, {}, "anchor_every 1..256, got .*'4'"),
        ({}, {"version": numpy.int64(4)}, "version must be an integer .*4"),
        ({}, {"version": True}, "version must be an integer .*True"),
        ({}, {"version": 10**12}, "version must be an integer in 0"),
        ({}, {"version": 1, "label": 5}, "label must be a text, got 5"),
        ({}, {"version": 1, "label": "\ud800"}, "label"),
        ({}, {"version": 1, "timeout": -1.0}, "timeout must be"),
    ],
)
def test_a_writer_names_what_it_cannot_take_before_it_writes(
    checkpoints, made, written, text
) -> None:
    store = PutGetList()
    with pytest.raises(ConfigError, match=text):
        VersionWriter(**{"store": store, "dtype": torch.float32, **made}).write(
            checkpoints[1], **written
        )
    assert not store.objects


def test_a_full_store_is_a_named_error(checkpoints) -> None:
    class Full(PutGetList):
        def put(self, key: str, *parts: bytes | memoryview) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(TransferFailed, match=r"the store failed.*No space left"):
        writer(Full()).write(checkpoints[1], 1)


def damaged(store: PutGetList, key: str, how: str) -> None:
    data = bytearray(store.objects[key])
    if how == "missing":
        del store.objects[key]
        return
    if how == "half":
        data = data[: len(data) // 2]
    elif how == "flipped":
        data[-5] ^= 1
    elif how == "garbage":
        data = bytearray(b"\xff" * len(data))
    store.objects[key] = bytes(data)


@pytest.mark.parametrize(
    ("part", "how", "error", "text"),
    [
        ("manifest.json", "missing", IncompleteUpdate, "version 1 has no manifest.json"),
        ("manifest.json", "half", IncompleteUpdate, "half-written"),
        ("bucket-000001", "missing", IncompleteUpdate, "bucket-000001 is missing"),
        ("bucket-000001", "half", IncompleteUpdate, "its manifest says"),
        ("bucket-000001", "garbage", IncompleteUpdate, "half-written"),
        ("bucket-000001", "flipped", ChecksumMismatch, "not what was written"),
    ],
)
def test_damage_is_named_and_changes_nothing(engine, checkpoints, part, how, error, text) -> None:
    store = PutGetList()
    writer(store).write(checkpoints[2], 1)
    damaged(store, f"000000000001/{part}", how)
    before = engine.live()
    with pytest.raises((error, SourceFailed), match=text):
        publish(
            VersionSource(store, 1), connect=lambda: engine, options=UpdateOptions(timeout=DEADLINE)
        )
    assert same(engine.live(), before)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "x"}, "is of 'x'"),
        ({"version": 2}, "is of"),
        ({"base": 1}, "cannot patch version 1"),
        ({"base": 0}, "version 0 has no manifest"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [-1]}]}, "malformed TensorMeta"),
        ({"buckets": None}, "malformed"),
        ({"digests": {"a": -1}}, "out of bounds"),
    ],
)
def test_a_manifest_is_not_believed(checkpoints, change, text) -> None:
    store = PutGetList()
    writer(store).write(checkpoints[2], 1)
    key = "000000000001/manifest.json"
    store.put(key, json.dumps({**json.loads(store.get(key)), **change}).encode())
    with pytest.raises((TransferFailed, IncompleteUpdate), match=text):
        read(store, 1)


def test_a_store_in_a_directory_stays_in_it(tmp_path) -> None:
    (tmp_path / "secret").write_text("x")
    store = LocalStore(tmp_path / "inside")
    store.put("1/a", b"b")
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "secret")
    for key in ("../secret", "link", "/etc/passwd", "1/../../secret", ""):
        with pytest.raises(ConfigError, match="outside the store"):
            store.get(key)
    assert store.list("") == ["1/a", "link"]


def test_a_base_that_is_gone_is_named_with_what_patches_it(checkpoints) -> None:
    """Somebody removed old versions to make room."""
    store = PutGetList()
    writing = writer(store, encoding="delta")
    for number in (1, 2, 3):
        writing.write(nudged(checkpoints[1], 0.01 * number), number)
    del store.objects["000000000002/manifest.json"]
    said = "version 3 holds changes to version 2, which must stay beside it .* a whole version"
    with pytest.raises(IncompleteUpdate, match=said):
        read(store, 3)


def test_a_delta_for_another_base_is_named(engine, store, checkpoints) -> None:
    """Version 2 was written against a version 1 that is not the one that lies there now."""
    writing = writer(store, encoding="delta")
    writing.write(checkpoints[1], 1)
    writing.write(nudged(checkpoints[1], 0.01), 2)
    other = PutGetList()
    writer(other).write(checkpoints[2], 1)
    for key in other.list("000000000001/"):
        store.put(key, other.get(key))
    before, started = engine.live(), time.monotonic()
    said = r"version 2 is not .* a version that it is built on, .* another trainer"
    with pytest.raises(ChecksumMismatch, match=said):
        publish(
            VersionSource(store, 2), connect=lambda: engine, options=UpdateOptions(timeout=DEADLINE)
        )
    assert time.monotonic() - started < DEADLINE
    assert same(engine.live(), before)
    assert engine.info().state == "idle"


class Vanishing(PutGetList):
    """A store that answers a few times, and then is gone."""

    def __init__(self, answers: int, error: Exception) -> None:
        super().__init__()
        self.answers, self.error = answers, error

    def get(self, key: str) -> bytes:
        self.answers -= 1
        if self.answers < 0:
            raise self.error
        return super().get(key)


@pytest.mark.parametrize(
    ("gone", "error", "text"),
    [
        (KeyError("bucket"), IncompleteUpdate, "bucket-000001 is missing, though"),
        (OSError(116, "Stale file handle"), SourceFailed, "Stale file handle"),
    ],
)
def test_a_store_that_vanishes_midway_is_named_on_both_sides(
    engine, checkpoints, gone, error, text
) -> None:
    store = Vanishing(1 << 30, gone)
    writer(store).write(checkpoints[2], 1)
    store.answers = 2  # the manifest and the first bucket
    before, started = engine.live(), time.monotonic()
    with pytest.raises(error, match=text):
        publish(
            VersionSource(store, 1), connect=lambda: engine, options=UpdateOptions(timeout=DEADLINE)
        )
    assert time.monotonic() - started < DEADLINE
    assert same(engine.live(), before)
    assert (engine.info().state, engine.ended) == ("idle", [True])


def test_a_writer_that_vanishes_leaves_no_version_behind(engine, checkpoints, tmp_path) -> None:
    """A whole version is followed; what a dead writer left is neither read nor waited for."""

    class Dies(LocalStore):
        def put(self, key: str, *parts: bytes | memoryview) -> None:
            if key.endswith("bucket-000003"):
                raise KeyboardInterrupt
            super().put(key, *parts)

    where = tmp_path / "run"
    where.mkdir()
    writer(LocalStore(where)).write(checkpoints[2], 4)
    with pytest.raises(KeyboardInterrupt):
        writer(Dies(where)).write(checkpoints[1], 5)
    following = Follower(where, [tmp_path], lambda: engine, timeout=DEADLINE)
    assert following.look().version == 4
    assert following.look() is None
    with pytest.raises(IncompleteUpdate, match=r"version 5 has no manifest\.json"):
        VersionSource(LocalStore(where), 5)
    writer(LocalStore(where)).write(checkpoints[1], 5)  # the next writer begins it anew
    assert following.look().version == 5
