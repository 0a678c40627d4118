"""A full disk and exhausted memory, for real: a named error in time, and the old version serves."""

from __future__ import annotations

import resource
import subprocess
import time
from pathlib import Path

import pytest
import torch
from shared_engines import eventually
from start_engines import GREEDY, PROMPTS, start
from tiny_models import write_tiny

from rollout import Rollout
from rollout.errors import ConfigError, TransferFailed
from rollout.testing.faults import Fault, Faulty
from rollout.testing.pressure import exhausted_memory, fill_disk, full_disk
from rollout.weight_sync.versions.follower import Follower
from rollout.weight_sync.versions.store import LocalStore
from rollout.weight_sync.versions.writer import VersionWriter

# One tensor of 82 MB, 41 on each rank: above what an allocator serves from memory it has kept.
LARGE = {"vocab_size": 80000, "hidden_size": 256, "tied": True}
BUCKET = 40 << 20
LIMITED = 4.0  # seconds


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large")
    write_tiny(path, **LARGE)
    other = write_tiny(tmp_path_factory.mktemp("other"), seed=1, **LARGE)
    with start(path, 2) as rollout:
        yield rollout, dict(other.state_dict())


def tokens(rollout: Rollout) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in rollout.generate(PROMPTS, GREEDY)]


def ranks(rollout: Rollout) -> list[int]:
    return [reply["pid"] for reply in rollout._async.backend.core.rank_info]


def test_a_rank_without_memory_for_the_shadow_refuses_the_update(large) -> None:
    rollout, new = large
    before, version, started = tokens(rollout), rollout.weight_version, time.monotonic()
    with (
        exhausted_memory(ranks(rollout)[1], spare=4 << 20),
        pytest.raises(TransferFailed, match=r"rank 1: .*memory"),
    ):
        rollout.update_weights(new, transport="inline", timeout=5)
    assert time.monotonic() - started < 25
    assert (rollout.weight_version, tokens(rollout)) == (version, before)
    assert rollout.update_weights(new, transport="inline", timeout=20).version == version + 1


@pytest.mark.parametrize("transport", ["inline", "broadcast"])
def test_a_rank_without_memory_for_a_bucket_refuses_the_update(large, transport) -> None:
    rollout, new = large
    rollout.update_weights(new, timeout=20)  # so that the shadow is there
    before, version, started = tokens(rollout), rollout.weight_version, time.monotonic()
    pid = ranks(rollout)[1]
    unlimited = resource.prlimit(pid, resource.RLIMIT_AS)
    fault = Fault("exhaust", "bucket", bucket=0, pid=pid, seconds=LIMITED, spare=1 << 20)
    changed = {name: tensor + 0.5 for name, tensor in new.items()}
    with pytest.raises(TransferFailed, match=r"rank 1: .*memory"):
        rollout.update_weights(
            changed, transport=Faulty(transport, fault), timeout=5, bucket_bytes=BUCKET
        )
    assert time.monotonic() - started < 25
    eventually(lambda: resource.prlimit(pid, resource.RLIMIT_AS) == unlimited)
    assert (rollout.weight_version, tokens(rollout)) == (version, before)
    assert rollout.update_weights(changed, timeout=20).version == version + 1
    assert tokens(rollout) != before


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True, capture_output=True)


def test_a_full_disk_fails_the_writing_and_the_engine_follows_the_next_version(
    small_disk, tmp_path
) -> None:
    write_tiny(tmp_path / "model")
    other = write_tiny(tmp_path / "other", seed=1).state_dict()
    assert sum(tensor.nbytes for tensor in other.values()) < 900 << 10
    writer = VersionWriter(LocalStore(small_disk), dtype=torch.float32, bucket_bytes=64 << 10)
    with start(tmp_path / "model", 1) as rollout:
        before = tokens(rollout)
        follower = Follower(small_disk, [small_disk], lambda: rollout._async.backend.link)
        started = time.monotonic()
        with full_disk(small_disk, spare=200 << 10):
            with pytest.raises(TransferFailed, match=r"No space left"):
                writer.write(other, 1)
            assert follower.look() is None
        assert time.monotonic() - started < 25
        assert (rollout.weight_version, tokens(rollout)) == (0, before)
        for left in small_disk.rglob("bucket-*"):
            left.unlink()
        writer.write(other, 2)
        receipt = follower.look()
        assert receipt is not None
        assert (receipt.version, rollout.weight_version) == (2, 2)
        assert tokens(rollout) != before


def test_a_disk_that_fills_up_during_an_update_does_not_matter_to_it(small_disk, tmp_path) -> None:
    write_tiny(tmp_path / "model")
    fault = Fault("fill", "connect", path=str(small_disk), seconds=1.0)
    new = write_tiny(tmp_path / "other", seed=1).state_dict()
    with start(tmp_path / "model", 1) as rollout:
        rollout.update_weights(new, transport=Faulty("inline", fault))
        with pytest.raises(OSError, match="No space"):
            (small_disk / "more").write_bytes(bytes(100 << 10))
        time.sleep(1.3)
        (small_disk / "more").write_bytes(bytes(100 << 10))


def test_a_large_disk_is_not_filled_and_what_is_needed_is_said() -> None:
    with pytest.raises(ConfigError, match="too much to fill on purpose"):
        fill_disk(Path(__file__).parent)
    with pytest.raises(ConfigError, match="needs its path"):
        Fault("fill")
    with pytest.raises(ConfigError, match="needs its path"):
        Fault("exhaust", pid=1)
    with pytest.raises(ConfigError, match="cannot be limited"), exhausted_memory(1 << 30):
        pass
