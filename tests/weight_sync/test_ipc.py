"""Shared memory: whose it is gets checked, and nothing is left of it however an update ends."""

from __future__ import annotations

import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_ranks import Engine
from trainer import Trainer, nudged

from rollout.errors import ConfigError, TransferFailed
from rollout.weight_sync.protocol.messages import BucketHeader, WeightInfo
from rollout.weight_sync.transports import ways
from rollout.weight_sync.transports.host import SHARED_MEMORY, host_id
from rollout.weight_sync.transports.shared_memory import (
    MAX_HALF,
    IpcReceiver,
    IpcSender,
    SharedFile,
)
from rollout.weights import TensorMeta

PAGE = 4096


def info(**changes) -> WeightInfo:
    facts = {
        "epoch": 1, "version": 0, "label": None, "state": "idle", "dtype": torch.float32,
        "tensors": (TensorMeta("a", torch.float32, (64, 64)),), "aliases": {},
        "tensor_parallel_size": 2, "device": "cpu", "host": host_id(),
        "transports": ("broadcast", "inline", "ipc"),
    }  # fmt: skip
    return WeightInfo(**{**facts, **changes})


class Channel:
    """The other side of a transport that is not under test here."""

    def wait(self, index: int, timeout: float) -> None: ...

    def bucket(self, header, payload) -> None:
        assert payload is None


@pytest.fixture
def sender():
    sender = IpcSender(info().tensors, 1 << 20)
    yield sender
    sender.close()


def left() -> set[str]:
    """Files of this process."""
    return {path.name for path in SHARED_MEMORY.glob(f"rollout-ipc-{os.getpid()}-*")}


def test_what_the_sender_writes_is_what_every_rank_reads(sender) -> None:
    halves = sender.buffers
    ranks = [IpcReceiver(sender.shared, rank, 1 << 20) for rank in range(2)]
    for rank in ranks:
        rank.connect(1.0)
    sender.connect(Channel(), 1.0)
    for index in range(5):
        header = BucketHeader(index, (), 1000)
        payload = halves[index % 2][:1000]
        payload.fill_(index + 7)
        sender.send(Channel(), header, payload)
        for rank in ranks:
            assert torch.equal(rank.receive(header, None, 1.0), payload)


def test_a_rank_cannot_change_what_others_read(sender) -> None:
    halves = sender.buffers
    ranks = [IpcReceiver(sender.shared, rank, 1 << 20) for rank in range(2)]
    for rank in ranks:
        rank.connect(1.0)
    halves[0].fill_(3)
    header = BucketHeader(0, (), 100)
    ranks[0].receive(header, None, 1.0).fill_(9)
    assert int(ranks[1].receive(header, None, 1.0).max()) == 3
    assert int(halves[0].max()) == 3


def test_the_name_is_gone_once_every_rank_has_mapped_it(sender) -> None:
    before = left() - {sender.shared.name}
    assert left() - before == {sender.shared.name}
    path = SHARED_MEMORY / sender.shared.name
    assert path.stat().st_mode & 0o777 == 0o600
    sender.connect(Channel(), 1.0)
    assert left() == before


def test_halves_are_no_larger_than_they_need_to_be(sender) -> None:
    small = IpcSender(info().tensors, 1 << 30)
    assert len(small.buffers[0]) <= 64 * 64 * 4 + 2 * PAGE
    big = IpcSender((TensorMeta("a", torch.float32, (1 << 16, 1 << 10)),), 1 << 30)
    try:
        assert len(big.buffers[0]) == MAX_HALF
    finally:
        big.close()
        small.close()


def test_halves_take_half_of_the_mount_or_what_is_left_there(monkeypatch) -> None:
    sizes = [
        (64, 64, 16),
        (64, 40, 16),
        (64, 30, 8),
        (1 << 20, 1 << 20, 32),
        (64, 0, 1),
        (0, 0, 32),
    ]
    for blocks, left, half in sizes:
        mount = SimpleNamespace(f_frsize=1 << 20, f_blocks=blocks, f_bavail=left)
        monkeypatch.setattr(os, "statvfs", lambda path, mount=mount: mount)
        sender = IpcSender(None, 1 << 30)
        sender.close()
        assert sender.shared.half == half << 20


def refusals(shared: SharedFile) -> dict[str, SharedFile]:
    return {
        "malformed": replace(shared, name="../tmp/rollout-ipc-1-" + "0" * 32),
        "is malformed": replace(shared, name="/etc/passwd"),
        "or secret": replace(shared, secret="x"),
        "not marked": replace(shared, secret="0" * 32),
        "were not agreed": replace(shared, half=1 << 40),
        "bytes were not": replace(shared, half=PAGE + 1),
        "announced were": replace(shared, half=shared.half + PAGE),
        "No such file": replace(shared, name=f"rollout-ipc-1-{secrets.token_hex(16)}"),
    }


@pytest.mark.parametrize("text", refusals(SharedFile(name="", secret="", half=0)))
def test_what_a_peer_says_of_the_file_is_not_believed(sender, text) -> None:
    rank = IpcReceiver(refusals(sender.shared)[text], 3, 1 << 20)
    with pytest.raises(TransferFailed, match=rf"rank 3.*{text}"):
        rank.connect(1.0)


def test_a_link_and_a_file_that_others_may_open_are_refused(sender, tmp_path) -> None:
    shared = sender.shared
    name = f"rollout-ipc-{os.getpid()}-{secrets.token_hex(16)}"
    link = SHARED_MEMORY / name
    link.symlink_to(SHARED_MEMORY / shared.name)
    try:
        with pytest.raises(TransferFailed, match="refused"):
            IpcReceiver(replace(shared, name=name), 0, 1 << 20).connect(1.0)
    finally:
        link.unlink()
    (SHARED_MEMORY / shared.name).chmod(0o644)
    with pytest.raises(TransferFailed, match="others may open it"):
        IpcReceiver(shared, 0, 1 << 20).connect(1.0)


def test_a_bucket_beyond_its_half_is_refused(sender) -> None:
    rank = IpcReceiver(sender.shared, 0, 1 << 20)
    rank.connect(1.0)
    with pytest.raises(TransferFailed, match="does not fit"):
        rank.receive(BucketHeader(0, (), sender.shared.half + 1), None, 1.0)


def test_an_engine_on_another_host_is_refused_by_name() -> None:
    for host in ("", "0" * 32):
        with pytest.raises(ConfigError, match="the engine is on another host"):
            ways("ipc", info(host=host))


def test_auto_takes_shared_memory_exactly_where_both_sides_have_it() -> None:
    def names(**changes) -> list[str]:
        return [way.transport.name for way in ways("auto", info(**changes))]

    assert names() == ["ipc", "broadcast", "inline"]
    assert names(host="0" * 32) == ["broadcast", "inline"]
    assert names(device="cuda:0") == ["broadcast", "inline"]
    assert names(transports=("broadcast", "inline")) == ["broadcast", "inline"]
    near = ("inline", "broadcast", "ipc")
    assert names(transports=near, tensor_parallel_size=1) == ["inline"]
    assert names(transports=near) == ["ipc", "inline", "broadcast"]
    assert "another host" in ways("auto", info(host="x"))[0].reason


KILLED = """
import os, sys
from test_ipc import info
from rollout.weight_sync.transports.shared_memory import IpcSender
sender = IpcSender(info().tensors, 1 << 20)
print(sender.shared.name, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_sender_left_is_removed_by_the_next_one() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        other = IpcSender(info().tensors, 1 << 20)
        assert (SHARED_MEMORY / name).exists()  # its sender lives
        other.close()
        process.send_signal(signal.SIGKILL)
        process.wait()
    IpcSender(info().tensors, 1 << 20).close()
    assert not (SHARED_MEMORY / name).exists()


# ---- "auto", where shared memory turns out not to work ----


class Elsewhere:
    """The engine as if its ranks saw another /dev/shm than their host id says."""

    local_address = "127.0.0.1"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.info, self.receipts = engine.info, engine.receipts

    def open(self):
        for path in SHARED_MEMORY.glob(f"rollout-ipc-{os.getpid()}-*"):
            path.unlink()
        return self._engine.open()


def test_auto_goes_another_way_when_the_ranks_cannot_open_the_file(engine, checkpoints) -> None:
    trainer, before = Trainer(engine, "auto"), left()
    trainer.send(checkpoints[1], encoding="delta")
    receipt = trainer.send(
        iter(nudged(checkpoints[2], 0.1).items()), encoding="delta", link=Elsewhere(engine)
    )
    assert receipt.transport == "broadcast"
    reason = receipt.details["transport_reason"]  # of whichever rank was the first to say so
    assert re.search("ipc failed: rank [01]: the shared memory", reason)
    assert (receipt.details["encoding"], receipt.version) == ("delta", 2)
    assert left() == before
    with pytest.raises(TransferFailed, match="is refused"):
        trainer.send(checkpoints[1], transport="ipc", link=Elsewhere(engine))
    assert (engine.version, engine.info().state) == (2, "idle")


def test_auto_goes_another_way_when_shared_memory_is_full(engine, checkpoints) -> None:
    trainer, before = Trainer(engine, "auto"), left()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, hard))
    try:
        receipt = trainer.send(checkpoints[2])
        with pytest.raises(TransferFailed, match="bytes of shared memory cannot be had"):
            trainer.send(checkpoints[2], transport="ipc")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert receipt.transport == "broadcast"
    assert "cannot be had" in receipt.details["transport_reason"]
    assert left() == before
