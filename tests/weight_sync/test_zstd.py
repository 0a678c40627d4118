"""Compressed changes: the same bits, fewer bytes, and no frame that outgrows what was agreed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_ranks import same
from trainer import Trainer, fresh, nudged

from rollout.errors import ConfigError, TransferFailed
from rollout.weight_sync.protocol import zstd
from rollout.weight_sync.protocol.bucket import unpack
from rollout.weight_sync.protocol.bucket_packer import BucketPacker
from rollout.weight_sync.protocol.committed import Committed
from rollout.weight_sync.protocol.delta import encode
from rollout.weight_sync.protocol.messages import BucketHeader
from rollout.weight_sync.trainer.encoder import choose_encoding
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.wire.codec import from_plain, to_plain

needs_zstd = pytest.mark.skipif(not zstd.available(), reason="zstd is not installed")


def delta(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(300, 301, generator=generator)
    changed = torch.rand(values.shape, generator=generator) < 0.02
    old, new = values.to(dtype), torch.where(changed, values * 2, values).to(dtype)
    found = encode(old, new, 1 << 20)
    assert found is not None
    return old, new, found


def bucket(coded):
    packer = BucketPacker(1 << 20)
    [(header, payload)] = [*packer.add_delta("x", coded), *packer.flush()]
    return from_plain(BucketHeader, to_plain(header)), payload.clone()


@needs_zstd
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_compressed_changes_come_back_bit_for_bit(dtype) -> None:
    old, new, found = delta(dtype)
    plain, packed = found.coded(), found.coded(compress=True)
    assert packed.nbytes < plain.nbytes == packed.inflated
    header, payload = bucket(packed)
    [(_, patch)] = unpack(header, payload, sparse=True, inflate=1 << 20)
    old.view(-1)[patch.positions] = patch.values
    assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


@needs_zstd
def test_a_frame_longer_than_agreed_is_refused_before_it_is_opened() -> None:
    header, payload = bucket(delta()[2].coded(compress=True))
    with pytest.raises(TransferFailed, match="over the agreed 0"):
        list(unpack(header, payload, sparse=True))
    with pytest.raises(TransferFailed, match="over the agreed 1000"):
        list(unpack(header, payload, sparse=True, inflate=1000))


@needs_zstd
@pytest.mark.parametrize("wrong", [-2, 2, 1 << 40])
def test_a_bomb_is_refused(wrong) -> None:
    """A frame that says another length than its entry, and an entry longer than its changes."""
    header, payload = bucket(delta()[2].coded(compress=True))
    [entry] = header.entries
    lied = BucketHeader(0, (replace(entry, inflated=entry.inflated + wrong),), header.nbytes)
    with pytest.raises(TransferFailed, match="bytes"):
        list(unpack(lied, payload, sparse=True, inflate=1 << 50))
    bomb = torch.frombuffer(bytearray(zstd.compress(bytes(1 << 26))), dtype=torch.uint8)
    assert len(bomb) < 10_000
    small = replace(entry, nbytes=len(bomb), inflated=entry.inflated)
    with pytest.raises(TransferFailed, match="a frame of 67108864 bytes"):
        list(unpack(BucketHeader(0, (small,), len(bomb)), bomb, sparse=True, inflate=1 << 20))


@needs_zstd
def test_damage_is_named() -> None:
    header, payload = bucket(delta()[2].coded(compress=True))
    for at in (0, 20, len(payload) - 1):
        hurt = payload.clone()
        hurt[at] ^= 255
        try:
            [(_, patch)] = unpack(header, hurt, sparse=True, inflate=1 << 20)
        except TransferFailed:
            continue
        assert patch.positions.numel() == header.entries[0].count  # the digest finds such ones


@needs_zstd
def test_an_update_says_that_it_was_compressed(engine, checkpoints) -> None:
    trainer = Trainer(engine, "inline")
    sizes = {}
    for encoding in ("delta", "delta-zstd"):
        trainer.send(checkpoints[2], encoding=encoding)
        grown = {n: t * 2 for n, t in checkpoints[2].items()}
        drawn = nudged({n: torch.zeros_like(t) for n, t in grown.items()}, 0.2)
        weights = {n: torch.where(drawn[n] > 0, grown[n], t) for n, t in checkpoints[2].items()}
        receipt = trainer.send(weights, encoding=encoding)
        assert receipt.details["encoding"] == encoding
        sizes[encoding] = receipt.wire_bytes
        assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))
    assert sizes["delta-zstd"] < sizes["delta"]


def test_without_zstd_what_was_asked_for_by_name_is_refused(
    engine, checkpoints, monkeypatch
) -> None:
    monkeypatch.setattr(zstd, "_library", lambda: None)
    with pytest.raises(ConfigError, match="pip install"):
        zstd.compress(b"x")
    with pytest.raises(TransferFailed, match="not installed here"):
        zstd.decompress(b"x", 1)
    trainer = Trainer(engine, "inline")
    version = engine.version
    with pytest.raises(ConfigError, match="zstd is not installed here: pip install zstandard"):
        trainer.send(checkpoints[2], encoding="delta-zstd")
    monkeypatch.setattr(zstd, "available", lambda: True)
    there = replace(engine.info(), zstd=False)
    options = UpdateOptions(encoding="delta-zstd")
    with pytest.raises(ConfigError, match="not installed on the engine's host"):
        choose_encoding(options, there, None, Committed(), None)
    assert engine.version == version
    trainer.send(checkpoints[2], encoding="auto")
