"""A directory that is followed: the newest good version is taken, whatever lies beside it."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from engine_ranks import same
from safetensors.torch import save_file
from trainer import BUCKET, DEADLINE, fresh, nudged

from rollout.errors import (
    ConfigError,
    IncompleteUpdate,
    SourceFailed,
    TransferFailed,
    WeightMismatch,
)
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.versions import directories
from rollout.weight_sync.versions import follower as following_module
from rollout.weight_sync.versions.directories import looks, readable
from rollout.weight_sync.versions.follower import Follower
from rollout.weight_sync.versions.store import LocalStore
from rollout.weight_sync.versions.writer import VersionWriter
from rollout.weights.files import open_weights

INDEX = "model.safetensors.index.json"


def writer(store, **options) -> VersionWriter:
    return VersionWriter(store, dtype=torch.float32, bucket_bytes=BUCKET, **options)


@pytest.fixture
def follower(engine, tmp_path):
    where = tmp_path / "run"
    where.mkdir()
    return Follower(where, [tmp_path], lambda: engine, timeout=DEADLINE), where


def checkpoint(path, weights, shards: int = 1) -> None:
    path.mkdir(parents=True)
    names = list(weights)
    files = {}
    for shard in range(shards):
        part = names[shard::shards]
        file = (
            f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            if shards > 1
            else ("model.safetensors")
        )
        save_file({name: weights[name] for name in part}, path / file)
        files.update(dict.fromkeys(part, file))
    if shards > 1:
        (path / INDEX).write_text(json.dumps({"weight_map": files}))


def test_a_version_whose_number_another_commit_took_is_warned_of_once(
    follower, engine, checkpoints, caplog
) -> None:
    following, where = follower
    checkpoint(where / "checkpoint-7", checkpoints[2])
    assert following.look().version == 7
    options = UpdateOptions(timeout=DEADLINE)
    assert publish(checkpoints[1], connect=lambda: engine, options=options).version == 8
    assert following.look() is None
    assert not caplog.records
    checkpoint(where / "checkpoint-8", checkpoints[2])
    assert [following.look() for _ in range(2)] == [None, None]
    [record] = caplog.records
    assert f"{where / 'checkpoint-8'} is not read: version 8 is live" in record.getMessage()
    assert "write it as 9 or later" in record.getMessage()
    (where / "checkpoint-8").rename(where / "checkpoint-9")
    assert following.look().version == 9
    assert len(caplog.records) == 1


def test_a_directory_that_cannot_be_looked_at_holds_nothing_up(
    follower, engine, checkpoints, monkeypatch, caplog
) -> None:
    """A file system's server that has forgotten one of them, for a while."""
    following, where = follower
    for number in (1, 2):
        checkpoint(where / f"checkpoint-{number}", checkpoints[1])
    assert following.look().version == 2
    is_file, stale = Path.is_file, [where / "checkpoint-1", where / "checkpoint-3"]

    def stat(path: Path) -> bool:
        if path.parent in stale:
            raise OSError(116, "Stale file handle", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", stat)
    checkpoint(where / "checkpoint-3", checkpoints[2])
    with pytest.raises(SourceFailed, match=r"checkpoint-3 cannot be read.*Stale file handle"):
        following.look()
    checkpoint(where / "checkpoint-4", checkpoints[2])
    assert following.look().version == 4
    stale.clear()
    assert following.look() is None
    assert "checkpoint-1" not in caplog.text


@pytest.mark.parametrize("kind", ["checkpoint", "version"])
def test_what_a_file_system_failed_to_read_is_tried_again_though_it_looks_the_same(
    follower, engine, checkpoints, monkeypatch, kind
) -> None:
    """As where its server starts again, or its answer came too late (EIO)."""
    following, where = follower
    if kind == "version":
        writer(LocalStore(where)).write(checkpoints[2], 1)
    else:
        checkpoint(where / "checkpoint-1", checkpoints[2])
    opened, failing = Path.open, [True]

    def failed(path: object) -> None:
        if failing and "manifest" not in str(path):
            raise OSError(5, "Input/output error")

    def open_file(path: Path, *words: object, **options: object) -> object:
        failed(path if kind == "version" else "manifest")
        return opened(path, *words, **options)

    preadv = os.preadv
    monkeypatch.setattr(Path, "open", open_file)
    monkeypatch.setattr(os, "preadv", lambda fd, *rest: failed(fd) or preadv(fd, *rest))
    with pytest.raises(SourceFailed, match=r"1/.* cannot be read.*Input/output error"):
        following.look()
    assert following.look() is None
    failing.clear()
    assert following.look() is None
    monkeypatch.setattr(following_module, "AGAIN", 0.0)
    assert following.look().version == 1
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))


def test_where_the_directory_itself_cannot_be_looked_at_that_is_said(
    engine, checkpoints, tmp_path
) -> None:
    """As one behind another that may not be searched; root may, so a name is too long here."""
    checkpoint(tmp_path / "there" / "checkpoint-1", checkpoints[1])
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "there")
    following = Follower(link, [tmp_path], lambda: engine, timeout=DEADLINE)
    link.unlink()
    link.symlink_to(tmp_path / ("x" * 300))
    with pytest.raises(SourceFailed, match=r"run cannot be read: .*name too long"):
        following.look()
    with pytest.raises(SourceFailed, match=r"run cannot be read: .*name too long"):
        Follower(link, [tmp_path], lambda: engine, timeout=DEADLINE)
    link.unlink()
    link.symlink_to(tmp_path / "there")
    assert following.look().version == 1


def test_what_is_live_from_there_already_is_no_news_to_a_front_that_is_started_anew(
    follower, engine, checkpoints, caplog
) -> None:
    following, where = follower
    checkpoint(where / "checkpoint-7", checkpoints[2])
    assert following.look().version == 7
    again = Follower(where, [where], lambda: engine, timeout=DEADLINE)
    assert again.look() is None
    assert not caplog.records
    checkpoint(where / "checkpoint-6", checkpoints[1])
    assert again.look() is None
    assert "checkpoint-6 is not read: it was written after version 7" in caplog.text


def test_what_a_trainer_that_began_anew_writes_is_warned_of_once(
    engine, checkpoints, tmp_path, caplog
) -> None:
    """Into new directories, over old ones, over what is live, and as versions."""
    for number in range(100, 140):  # more than are looked at each time
        checkpoint(tmp_path / f"checkpoint-{number}", checkpoints[1])
    following = Follower(tmp_path, [tmp_path], lambda: engine, timeout=DEADLINE)
    assert following.look().version == 139  # what lay there before is no news
    torch.save({"step": 139}, tmp_path / "checkpoint-139" / "optimizer.pt")
    shutil.rmtree(tmp_path / "checkpoint-120")  # a Trainer keeps some
    assert [following.look() for _ in range(3)] == [None] * 3
    assert not caplog.records
    checkpoint(tmp_path / "checkpoint-10", checkpoints[2])
    for number in (130, 139):
        save_file(checkpoints[2], tmp_path / f"checkpoint-{number}" / "model.safetensors")
    writer(LocalStore(tmp_path)).write(checkpoints[2], 5)
    assert [following.look() for _ in range(4)] == [None] * 4
    named = ("checkpoint-139", "checkpoint-130", "checkpoint-10", "000000000005")
    assert sorted(caplog.messages) == sorted(
        text for name in named for text in caplog.messages
        if text.startswith(f"{tmp_path / name} is not read: it was written after version 139")
    )  # fmt: skip
    assert len(caplog.records) == len(named)
    assert "is numbered above the live version, 139, is followed" in caplog.text


@pytest.mark.parametrize(
    ("form", "others"),
    [
        ("model.safetensors", ("scaler.pt", "pytorch_model_fsdp.bin")),
        ("pytorch_model.bin", ("scaler.pt",)),
    ],
)
def test_what_a_trainer_writes_beside_weights_that_are_followed_is_no_news(
    follower, checkpoints, caplog, form, others
) -> None:
    """Trainer's own order: the weights, then what it goes on from, with names like weights'; and it
    removes a checkpoint file by file.
    """
    following, where = follower
    path = where / "checkpoint-7"
    path.mkdir()
    (save_file if "safe" in form else torch.save)(checkpoints[1], path / form)
    assert following.look().version == 7
    for name in others:
        torch.save({"scale": 1.0}, path / name)
        assert following.look() is None
    (path / form).unlink()
    assert following.look() is None
    assert not caplog.records


def test_what_is_completed_before_a_higher_number_is_followed_is_no_news(
    engine, checkpoints, tmp_path, caplog
) -> None:
    """Also where there are more than are looked at each time."""
    for number in range(40):
        checkpoint(tmp_path / f"checkpoint-{number}", checkpoints[1])
    following = Follower(tmp_path, [tmp_path], lambda: engine, timeout=DEADLINE)
    assert following.look().version == 39
    for number in range(40, 52, 2):
        path = tmp_path / f"checkpoint-{number}"
        checkpoint(path, checkpoints[2], shards=2)
        index = (path / INDEX).rename(tmp_path / "later")
        last = (path / "model-00002-of-00002.safetensors").rename(tmp_path / "last")
        assert following.look() is None
        last.rename(path / "model-00002-of-00002.safetensors")
        index.rename(path / INDEX)
        checkpoint(tmp_path / f"checkpoint-{number + 1}", checkpoints[1])
        assert following.look().version == number + 1
        assert following.look() is None
    assert "was written after" not in caplog.text


@pytest.mark.parametrize("shards", [1, 3])
def test_new_checkpoints_are_followed(follower, engine, checkpoints, shards) -> None:
    following, where = follower
    assert following.look() is None
    checkpoint(where / "checkpoint-500", checkpoints[2], shards)
    receipt = following.look()
    assert (receipt.version, receipt.label) == (500, "checkpoint-500")
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))
    assert following.look() is None
    checkpoint(where / "checkpoint-400", checkpoints[1], shards)
    assert following.look() is None  # older than what is live
    writer(LocalStore(where)).write(checkpoints[1], 501)
    assert following.look().version == 501
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[1]))


def test_what_lies_where_a_link_leads_later_is_no_news(
    engine, checkpoints, tmp_path, caplog
) -> None:
    """But for the newest, where nothing there is above what is live."""
    for name, numbers in (("first", (2, 3)), ("second", (1, 2, 3, 4)), ("third", (1, 2))):
        for number in numbers:
            checkpoint(tmp_path / name / f"checkpoint-{number}", checkpoints[1 + number % 2])
    link = tmp_path / "newest"
    link.symlink_to("first")
    following = Follower(link, [tmp_path], lambda: engine, timeout=DEADLINE)
    for name, version in (("first", 3), ("second", 4)):
        link.unlink()
        link.symlink_to(name)
        assert following.look().version == version
        assert following.look() is None
        assert not caplog.records
    link.unlink()
    link.symlink_to("third")
    assert [following.look() for _ in range(2)] == [None] * 2
    [text] = caplog.messages
    assert text.startswith(f"{tmp_path / 'third' / 'checkpoint-2'} is not read: version 4 is live")


def test_a_link_is_followed_to_where_it_leads_now(engine, checkpoints, tmp_path) -> None:
    roots = [tmp_path / "runs"]
    checkpoint(tmp_path / "runs" / "first" / "checkpoint-3", checkpoints[1])
    checkpoint(tmp_path / "runs" / "second" / "checkpoint-4", checkpoints[2])
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "runs" / "newest"
    link.symlink_to("first")
    following = Follower(link, roots, lambda: engine, timeout=DEADLINE)
    assert following.look().version == 3
    link.unlink()
    with pytest.raises(SourceFailed, match=f"{link} cannot be read"):
        following.look()
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"{link} is outside every --weight-dir"):
        following.look()
    link.unlink()
    link.symlink_to("second")
    assert following.look().version == 4


@contextmanager
def unreadable(file: Path) -> Iterator[None]:
    """Also for root, which gives up its rights meanwhile."""
    file.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize("form", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_may_not_be_read_is_named_as_that_and_followed_once_it_may(
    engine, checkpoints, form
) -> None:
    with TemporaryDirectory() as scratch:  # those of pytest are root's alone
        where, path = Path(scratch), Path(scratch) / "checkpoint-5"
        where.chmod(0o755)
        path.mkdir(mode=0o755)
        file = path / form
        save_file(checkpoints[2], file) if "safe" in form else torch.save(checkpoints[2], file)
        following = Follower(where, [where], lambda: engine, timeout=DEADLINE)
        refused = f"cannot be read.*Permission denied.*{form}"
        with unreadable(file):
            with pytest.raises(SourceFailed, match=refused):
                following.look()
            assert following.look() is None
            with pytest.raises(SourceFailed, match=refused):
                readable(path, [where], engine.info())
            with pytest.raises(ConfigError, match=f"{file} cannot be read .*Permission denied"):
                open_weights(path)
        file.chmod(0o644)
        assert following.look().version == 5


def test_names_that_are_times_are_numbers(follower, engine, checkpoints, caplog) -> None:
    following, where = follower
    for number, name in enumerate(("202601020304", "run-1767323045006", "20260102030405")):
        checkpoint(where / name, checkpoints[1 + number % 2])
        receipt = following.look()
        assert receipt is not None, name
        assert receipt.label == name
        shutil.rmtree(where / name)
    checkpoint(where / "run-1767323045006007", checkpoints[1])
    assert [following.look() for _ in range(2)] == [None] * 2
    [text] = caplog.messages
    assert text.startswith(f"{where / 'run-1767323045006007'} is not followed: its number has more")


def test_what_is_not_complete_yet_waits(follower, engine, checkpoints) -> None:
    following, where = follower
    half = where / "checkpoint-7"
    checkpoint(half, checkpoints[2], 3)
    index = (half / INDEX).read_text()
    shard = half / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    checkpoint(where / "checkpoint-3", checkpoints[1])
    (half / INDEX).unlink()  # shards without an index
    assert following.look().version == 3  # the newest one that is complete
    (half / INDEX).write_text(index[:30])
    assert following.look() is None
    (half / INDEX).write_text(index)
    for data in (whole[:5], whole[:100], whole[:-1]):
        shard.write_bytes(data)
        assert following.look() is None
    shard.unlink()
    assert following.look() is None
    shard.write_bytes(whole)
    assert following.look().version == 7
    (where / "000000000009").mkdir()
    (where / "000000000009" / "bucket-000000").write_bytes(b"x")  # no manifest
    (where / "checkpoint-11").mkdir()
    assert following.look() is None
    assert engine.version == 7


@pytest.mark.parametrize("make_room", ["truncate", "fallocate"])
def test_a_file_of_full_length_that_was_written_in_part_is_not_complete(
    follower, engine, checkpoints, caplog, make_room
) -> None:
    """As whoever makes room before it copies leaves it, where it is stopped."""
    following, where = follower
    checkpoint(where / "checkpoint-7", checkpoints[2])
    file = where / "checkpoint-7" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 3])
    with file.open("r+b") as opened:
        if make_room == "truncate":
            opened.truncate(len(whole))
        else:
            os.posix_fallocate(opened.fileno(), 0, len(whole))
        if os.lseek(opened.fileno(), len(whole) - 1, os.SEEK_HOLE) == len(whole):
            pytest.skip("this file system does not tell")
    assert [following.look() for _ in range(3)] == [None] * 3
    [record] = caplog.records
    assert f"{file} has its full length" in record.getMessage()
    with file.open("r+b") as opened:
        opened.write(whole)
    assert following.look().version == 7
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))


def test_what_is_left_incomplete_is_warned_of_once(follower, engine, checkpoints, caplog) -> None:
    following, where = follower
    checkpoint(where / "checkpoint-7", checkpoints[2])
    file = where / "checkpoint-7" / "model.safetensors"
    whole = file.read_bytes()
    for size in (10, 100, 1000):  # somebody writes it
        file.write_bytes(whole[:size])
        assert following.look() is None
    assert not caplog.records
    assert [following.look() for _ in range(3)] == [None] * 3
    checkpoint(where / "checkpoint-5", checkpoints[1])
    assert following.look().version == 5
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert f"{where / 'checkpoint-7'} is incomplete" in record.getMessage()
    assert f"{file} is half-written" in record.getMessage()
    file.unlink()  # another reason
    assert [following.look() for _ in range(3)] == [None] * 3
    assert [f"{where / 'checkpoint-7'} has no" in text for text in caplog.messages] == [False, True]
    file.write_bytes(whole)
    assert following.look().version == 7
    assert len(caplog.records) == 2


def test_nothing_is_kept_of_how_followed_versions_looked(follower, engine, checkpoints) -> None:
    """Each of which was incomplete at a look."""
    following, where = follower
    looked = tracemalloc.Filter(True, directories.__file__)
    held = []
    tracemalloc.start()
    try:
        for number in range(1, 7):
            path = where / f"checkpoint-{number}"
            checkpoint(path, checkpoints[1 + number % 2])
            for index in range(300):
                (path / f"other-{index}").touch()
            (path / "model.safetensors").rename(where / "late")
            assert following.look() is None
            (where / "late").rename(path / "model.safetensors")
            assert following.look().version == number
            assert following.look() is None
            traces = tracemalloc.take_snapshot().filter_traces([looked]).traces
            held.append(sum(trace.size for trace in traces))
    finally:
        tracemalloc.stop()
    assert held[-1] - held[1] < 16 << 10  # less than one of them takes


def test_what_does_not_fit_is_named_once_and_changes_nothing(follower, engine, checkpoints) -> None:
    following, where = follower
    before = engine.live()
    checkpoint(where / "checkpoint-1", {"model.other": torch.ones(3)})
    with pytest.raises(WeightMismatch, match=r"model\.other"):
        following.look()
    assert following.look() is None  # the same files are not tried again
    assert same(engine.live(), before)
    checkpoint(where / "checkpoint-2", checkpoints[2])
    assert following.look().version == 2


def test_only_the_allowed_directories_are_read(engine, tmp_path, checkpoints) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    allowed.mkdir()
    checkpoint(outside / "checkpoint-1", checkpoints[2])
    with pytest.raises(ConfigError, match=f"outside every --weight-dir.*--weight-dir {outside}"):
        Follower(outside, [allowed], lambda: engine)
    with pytest.raises(ConfigError, match="is not a directory"):
        Follower(allowed / "no", [allowed], lambda: engine)
    following = Follower(allowed, [allowed], lambda: engine, timeout=DEADLINE)
    (allowed / "checkpoint-1").symlink_to(outside / "checkpoint-1")
    with pytest.raises(ConfigError, match="outside every --weight-dir; not read"):
        following.look()
    (allowed / "checkpoint-1").unlink()
    (allowed / "checkpoint-2").mkdir()
    (allowed / "checkpoint-2" / "model.safetensors").symlink_to(
        outside / "checkpoint-1" / "model.safetensors"
    )
    with pytest.raises(ConfigError, match="outside every --weight-dir; not read"):
        following.look()
    assert engine.version == 0


def test_a_follower_goes_on_after_a_failure_until_it_is_stopped(
    follower, engine, checkpoints, caplog
) -> None:
    following, where = follower
    checkpoint(where / "checkpoint-1", {"model.other": torch.ones(3)})
    stop = threading.Event()
    thread = threading.Thread(target=following.run, args=(stop, 0.05))
    thread.start()
    try:
        _until(lambda: "WeightMismatch" in caplog.text)
        checkpoint(where / "tmp-checkpoint-2", checkpoints[2])
        (where / "tmp-checkpoint-2").rename(where / "checkpoint-2")
        _until(lambda: engine.version == 2)
    finally:
        stop.set()
        thread.join(10)
    assert not thread.is_alive()
    assert caplog.text.count("WeightMismatch") == 1
    assert f"{where / 'checkpoint-1'}: WeightMismatch: " in caplog.text


def test_of_no_use_is_passed_over_and_said_once(follower, engine, checkpoints, caplog) -> None:
    """The newest ones are unreadable, malformed, vanishing or lead outside; older ones are good."""
    following, where = follower
    outside = where.parent.parent / f"{where.parent.name}-outside"
    checkpoint(where / "checkpoint-5", checkpoints[2])
    checkpoint(outside / "checkpoint-96", checkpoints[2])
    (where / "checkpoint-96").symlink_to(outside / "checkpoint-96")
    (where / "checkpoint-97").symlink_to(where / "gone")
    (where / "000000000098").mkdir()
    (where / "000000000098" / "manifest.json").write_text('{"format": "rollout-version-2"}')
    (where / "checkpoint-99").mkdir()
    loop = where / "checkpoint-99" / "model.safetensors"
    loop.symlink_to(loop)
    assert following.look().version == 5
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))
    for text in ("outside every --weight-dir", "version 98", "checkpoint-99"):
        assert sum(text in record.getMessage() for record in caplog.records) == 1, text
    assert following.look() is None
    assert len(caplog.records) == 3  # nothing is said twice
    checkpoint(where / "checkpoint-100", checkpoints[1])
    assert following.look().version == 100
    assert len(caplog.records) == 3


def test_what_vanishes_or_cannot_be_read_between_two_looks_is_passed_over(
    follower, engine, checkpoints, monkeypatch
) -> None:
    following, where = follower
    checkpoint(where / "checkpoint-1", checkpoints[2])
    for number in (2, 3):
        checkpoint(where / f"checkpoint-{number}", checkpoints[1])
    listed = Path.iterdir

    def iterdir(path):
        if path.name == "checkpoint-3":
            raise PermissionError(13, "Permission denied", str(path))
        if path.name == "checkpoint-2":
            shutil.rmtree(path, ignore_errors=True)
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert following.look().version == 1
    assert following.look() is None


def test_a_damaged_version_does_not_hide_older_ones(follower, engine, checkpoints) -> None:
    following, where = follower
    checkpoint(where / "checkpoint-3", checkpoints[2])
    writer(LocalStore(where)).write(checkpoints[1], 9)
    bucket = next((where / "000000000009").glob("bucket-*"))
    data = bytearray(bucket.read_bytes())
    data[8:40] = b"#" * 32  # its header: of the right length, but no JSON
    bucket.write_bytes(data)
    with pytest.raises(TransferFailed, match="malformed"):
        following.look()
    assert following.look().version == 3
    assert following.look() is None


@pytest.mark.parametrize("late", ["", "bucket-000000"])
def test_a_version_is_taken_once_what_its_changes_are_built_on_is_there(
    follower, engine, checkpoints, late
) -> None:
    """As where one that was removed is brought back, or files arrive in another order."""
    following, where = follower
    writing = writer(LocalStore(where), encoding="delta")
    for number in (1, 2, 3):
        writing.write(nudged(checkpoints[1], 0.01 * number), number)
    base, away = where / "000000000001" / late, where.parent / "away"
    base.rename(away)
    for _ in range(2):
        with pytest.raises(IncompleteUpdate):  # of 3, then of 2
            following.look()
    for _ in range(2):
        with suppress(IncompleteUpdate):  # of 1, where it is there in part
            assert following.look() is None
    assert len(engine.ended) == (3 if late else 2)  # nothing is tried again meanwhile
    away.rename(base)
    assert following.look().version == 3
    wanted = fresh(engine, checkpoints, "plain", nudged(checkpoints[1], 0.03))
    assert same(engine.live(), wanted)


def test_what_many_versions_are_built_on_is_looked_at_once(
    follower, engine, checkpoints, monkeypatch
) -> None:
    """Each second, for as long as it is of no use: of 256, it took longer than that."""
    following, where = follower
    writing = writer(LocalStore(where), encoding="delta")
    for number in range(1, 7):
        writing.write(nudged(checkpoints[1], 0.01 * number), number)
    (where / "000000000001" / "bucket-000000").unlink()
    for _ in range(6):
        with pytest.raises(IncompleteUpdate):
            following.look()
    looked = []
    monkeypatch.setattr(following_module, "looks", lambda path: looked.append(path) or looks(path))
    assert following.look() is None
    assert sorted(looked) == sorted(where.iterdir())


def test_a_version_whose_base_lies_outside_is_refused(engine, checkpoints, tmp_path) -> None:
    versions = VersionWriter(LocalStore(tmp_path), dtype=torch.float32, encoding="delta")
    versions.write(checkpoints[1], 1)
    versions.write(nudged(checkpoints[1], 0.01), 2)
    info = engine.info()
    base, changes = (tmp_path / f"{number:012d}" for number in (1, 2))
    with pytest.raises(ConfigError, match="outside every --weight-dir"):
        list(readable(changes, [changes], info))
    assert dict(readable(changes, [changes, base], info)).keys() == checkpoints[1].keys()


def test_no_error_ends_the_thread_and_the_last_one_is_told(
    engine, checkpoints, tmp_path, caplog
) -> None:
    told, broken = [], threading.Event()

    def connect():
        if not broken.is_set():
            raise ValueError("of no kind that was thought of")
        return engine

    following = Follower(tmp_path, [tmp_path], connect, timeout=DEADLINE, on_state=told.append)
    checkpoint(tmp_path / "checkpoint-4", checkpoints[2])
    stop = threading.Event()
    thread = threading.Thread(target=following.run, args=(stop, 0.02))
    thread.start()
    try:
        _until(lambda: len(told) > 3)
        assert thread.is_alive()
        assert caplog.text.count("ValueError: of no kind that was thought of") == 2  # + traceback
        broken.set()
        _until(lambda: told[-1] == "")
    finally:
        stop.set()
        thread.join(30)
    assert engine.version == 4


def _until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
