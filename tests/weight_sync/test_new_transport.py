"""A transport is one row of the registry and one file, here this one: nothing else names it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_ranks import Engine, same
from trainer import Trainer, fresh

from rollout.errors import ConfigError, TransferFailed
from rollout.weight_sync import transports
from rollout.weight_sync.transports.base import Accepted, Sender, Transport


class Files(Transport):
    """A file per bucket, in a directory that both sides see."""

    name = "files"
    where = Path()

    def open(self, opening):
        return _Writer(str(self.where))

    def check(self, request, num_ranks, device):
        if not Path(request.offer.get("directory", "")).is_dir():
            raise ConfigError("the offer names no directory")
        return Accepted()

    def receiver(self, request, at):
        return _Reader(request.offer["directory"])


class _Writer(Sender):
    bytes_go = "memory"

    def __init__(self, directory):
        self.offer = {"directory": directory}

    def send(self, channel, header, payload):
        Path(self.offer["directory"], f"{header.index}").write_bytes(payload.numpy().tobytes())
        channel.bucket(header, None)


class _Reader:
    def __init__(self, directory):
        self._directory = directory

    def connect(self, timeout):
        return None

    def receive(self, header, carried, timeout):
        data = Path(self._directory, f"{header.index}").read_bytes()
        if len(data) != header.nbytes:
            raise TransferFailed(f"bucket {header.index} has {len(data)} bytes")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def close(self):
        return None


@pytest.fixture
def engine(checkpoints, monkeypatch, tmp_path):
    monkeypatch.setitem(transports.MODULES, "files", f"{__name__}:Files")
    monkeypatch.setattr(Files, "where", tmp_path)
    engine = Engine(checkpoints[0], 2, checkpoints[1])
    yield engine
    engine.close()


def test_an_update_by_a_new_transport(engine, checkpoints, tmp_path, monkeypatch) -> None:
    assert "files" in engine.info().transports
    trainer = Trainer(engine, "files")
    receipt = trainer.send(checkpoints[2])
    assert (receipt.transport, receipt.version) == ("files", 1)
    assert same(engine.live(), fresh(engine, checkpoints, "plain", checkpoints[2]))
    assert trainer.send(checkpoints[1], transport="auto").transport == "ipc"
    monkeypatch.setattr(Files, "where", tmp_path / "missing")
    with pytest.raises(ConfigError, match="no directory"):
        trainer.send(checkpoints[1])
    assert engine.version == 2
