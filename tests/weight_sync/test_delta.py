"""Deltas: lossless by bits, never longer than the whole, and never applied to another base."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from engine_ranks import Engine, same
from tiny_models import write_tiny
from tiny_vision import write_vision
from trainer import BUCKET, DEADLINE, Trainer, fresh, nudged

from rollout.errors import (
    ChecksumMismatch,
    ConfigError,
    TransferFailed,
    VersionConflict,
    WeightMismatch,
)
from rollout.models.config.model import ModelConfig
from rollout.weight_sync.protocol.bucket import unpack
from rollout.weight_sync.protocol.bucket_packer import BucketPacker
from rollout.weight_sync.protocol.committed import Committed
from rollout.weight_sync.protocol.delta import encode
from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader, UpdateRequest
from rollout.weight_sync.trainer import encoder as encodings
from rollout.weight_sync.trainer.publisher import UpdateOptions
from rollout.weights import Box, SparsePatch
from rollout.wire.codec import from_plain, to_plain

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_bits(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("changed", [0, 1, 7, 400])
def test_any_bits_survive_through_buckets(dtype, changed) -> None:
    old = random_bits(9999, dtype, 0).view(101, 99)
    new = old.clone()
    where = torch.randperm(9999, generator=torch.Generator().manual_seed(changed))[:changed]
    new.view(-1).view(INTEGERS[dtype.itemsize])[where] ^= 1
    found = encode(old.clone(), new, 1 << 20)
    assert found is not None
    assert len(found.values) == changed
    packer = BucketPacker(1 << 15)
    made = [
        *packer.add("whole", old),
        *packer.add_delta("x", found.coded()), *packer.add_delta("y", found.coded()),
        *packer.flush(),
    ]  # fmt: skip
    seen = []
    for header, payload in made:
        payload = payload.clone()
        again = from_plain(BucketHeader, to_plain(header))
        assert again == header
        for name, value in unpack(again, payload, sparse=True):
            if not isinstance(value, SparsePatch):
                continue
            patched = old.clone()
            bits = patched.view(-1).view(INTEGERS[dtype.itemsize])
            bits[value.positions] = value.values.view(INTEGERS[dtype.itemsize])
            assert torch.equal(patched.view(torch.uint8), new.view(torch.uint8))
            seen.append(name)
    assert seen == ["x", "y"]


def test_nan_equals_itself_and_minus_zero_differs_from_zero() -> None:
    old = torch.tensor([float("nan"), 0.0, 1.0, 2.0] * 4)
    new = old.clone()
    new[5] = -0.0
    found = encode(old, new, 1 << 20)
    assert found is not None
    assert (found.codes.tolist(), found.width) == ([5], 1)
    assert torch.signbit(found.values).all()


def test_what_is_no_shorter_goes_whole() -> None:
    old, new = torch.zeros(1000), torch.ones(1000)
    assert encode(old.clone(), new, 1 << 20) is None
    new[10:] = 0
    assert encode(old.clone(), new, 1 << 20) is not None
    assert encode(old, new, 20) is None
    assert torch.equal(old, new)  # the copy is brought up all the same


def test_the_copy_follows_what_was_sent() -> None:
    committed = Committed()
    values = torch.zeros(64, 64, dtype=torch.bfloat16)
    box = Box.full((64, 64))
    assert committed.change("x", box, values, 1 << 20) is None
    values[3, 5] = 1
    for expected in (1, 0):
        found = committed.change("x", box, values, 1 << 20)
        assert found is not None
        assert len(found.values) == expected
    assert committed.values["x", box].data_ptr() != values.data_ptr()


def entry(**changes) -> tuple[BucketHeader, torch.Tensor]:
    """A good bucket of one change at position 3 of 10, or one with something else in it."""
    fields = {
        "name": "x", "dtype": torch.float32, "shape": (10,), "box": Box.full((10,)), "offset": 0,
        "nbytes": 5, "sparse": 1, "count": 1, **changes,
    }  # fmt: skip
    made = BucketEntry(**fields)
    payload = torch.tensor([0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0], dtype=torch.uint8)[: made.nbytes]
    return BucketHeader(0, (made,), made.nbytes), payload.clone()


BAD = {
    "gaps of 3 bytes": {"sparse": 3},
    "changed of 10": {"count": 11, "nbytes": 55},
    "cannot hold": {"nbytes": 4},
    "cannot hold 1 changes": {"nbytes": 9},
    "for no change": {"count": 0},
    "cannot hold 1": {"sparse": 2},
    "lies outside shape": {"box": Box((5,), (11,))},
    "2 changed of 1 elements": {"box": Box((0,), (1,)), "count": 2, "nbytes": 10},
    "said to be 5 compressed": {"inflated": 5},
}


@pytest.mark.parametrize("text", BAD)
def test_a_malformed_entry_is_refused_before_it_is_read(text) -> None:
    header, payload = entry(**BAD[text])
    with pytest.raises(TransferFailed, match=text):
        unpack(header, payload, sparse=True)


@pytest.mark.parametrize("codes", [[255], [10], [200]])
def test_codes_that_lead_outside_are_refused(codes) -> None:
    header, payload = entry()
    payload[4:] = torch.tensor(codes, dtype=torch.uint8)
    with pytest.raises(TransferFailed, match="not those of 1 positions in 10 elements"):
        list(unpack(header, payload, sparse=True))


def test_changes_of_a_part_stay_in_it() -> None:
    header, payload = entry(box=Box((2,), (7,)))
    [(_, patch)] = unpack(header, payload, sparse=True)
    assert (patch.positions.tolist(), patch.box) == ([5], Box((2,), (7,)))
    header, payload = entry(box=Box((2,), (5,)))
    with pytest.raises(TransferFailed, match="not those of 1 positions in 3 elements"):
        list(unpack(header, payload, sparse=True))


def test_a_delta_in_a_full_update_is_refused() -> None:
    header, payload = entry()
    assert next(iter(unpack(header, payload, sparse=True)))[1].positions.tolist() == [3]
    with pytest.raises(TransferFailed, match="a delta came in an update that is full"):
        unpack(header, payload)


# ---- against an engine ----


def test_another_senders_commit_makes_the_next_update_full(engine, checkpoints) -> None:
    trainer, other = Trainer(engine, "inline"), Trainer(engine, "inline")
    trainer.send(checkpoints[2], encoding="delta")
    other.send(checkpoints[1], encoding="delta")
    weights = nudged(checkpoints[2], 0.01)
    receipt = trainer.send(weights, encoding="delta")
    assert receipt.details["encoding"] == "full"
    assert "does not hold what this sender last committed" in receipt.details["encoding_reason"]
    assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))
    assert trainer.send(weights, encoding="delta").details["encoding"] == "delta"


def test_a_full_update_by_a_delta_says_what_there_was_nothing_to_compare_with(
    engine, checkpoints
) -> None:
    trainer = Trainer(engine, "inline")

    def why(**options) -> str:
        details = trainer.send(checkpoints[2], encoding="delta", **options).details
        return details["encoding_reason"]

    assert why().startswith("this sender has nothing to compare with: it is its first update by")
    assert why().startswith("built on the live version")
    with pytest.raises(WeightMismatch):
        trainer.send({"no.such": torch.zeros(1)}, encoding="delta")
    assert "or the one before failed; the next one can be a delta" in why()
    engine.rollback(DEADLINE)
    live = engine.version
    assert f"version {live} is live, by another commit or a rollback" in why()
    engine.epoch += 1
    assert why() == "the engine has restarted since this sender's last commit"


class StaleLink:
    """An engine whose version moves between ``info`` and ``begin``."""

    def __init__(self, engine: Engine, moved: dict[str, torch.Tensor]) -> None:
        self._engine, self._moved = engine, moved
        self.receipts, self.local_address = engine.receipts, engine.local_address

    def info(self):
        info = self._engine.info()
        Trainer(self._engine, "inline").send(self._moved)
        return info

    def open(self):
        return self._engine.open()


def test_a_refused_base_falls_back_without_reading_the_source_twice(
    engine,
    checkpoints,
) -> None:
    trainer = Trainer(engine, "ipc")
    trainer.send(checkpoints[2], encoding="delta")
    weights = nudged(checkpoints[2], 0.01)
    pulled = []

    def once():
        for name, tensor in weights.items():
            pulled.append(name)
            yield name, tensor

    link = StaleLink(engine, checkpoints[1])
    receipt = trainer.send(once(), encoding="delta", link=link)
    assert receipt.details["encoding"] == "full"
    assert "refused a delta: built on" in receipt.details["encoding_reason"]
    assert pulled == list(weights)
    assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))


def test_a_rollback_and_a_restart_make_the_next_update_full(engine, checkpoints) -> None:
    trainer = Trainer(engine, "inline")
    for weights in (checkpoints[1], checkpoints[2]):
        trainer.send(weights, encoding="delta")
    engine.rollback(DEADLINE)
    assert trainer.send(checkpoints[2], encoding="delta").details["encoding"] == "full"
    engine.epoch += 1
    assert trainer.send(checkpoints[2], encoding="delta").details["encoding"] == "full"
    assert trainer.send(checkpoints[2], encoding="delta").details["encoding"] == "delta"


def test_an_anchor_comes_every_so_often(engine, checkpoints) -> None:
    trainer = Trainer(engine, "inline")
    kinds = [
        trainer.send(nudged(checkpoints[2], 0.01, seed), encoding="delta", anchor_every=3).details[
            "encoding"
        ]
        for seed in range(7)
    ]
    assert kinds == ["full", "delta", "delta", "full", "delta", "delta", "full"]


def test_a_wrong_base_of_the_sender_cannot_pass(engine, checkpoints) -> None:
    trainer = Trainer(engine, "inline")
    trainer.send(checkpoints[2], encoding="delta")
    committed = trainer.base.take()
    (norm,) = [held for (name, _), held in committed.values.items() if name == "model.norm.weight"]
    norm[3] += 1  # the copy is not what was committed
    trainer.base.put(committed)
    before = engine.live()
    weights = {n: t.clone() for n, t in checkpoints[2].items()}
    weights["model.norm.weight"][3] += 1
    with pytest.raises(ChecksumMismatch, match=r"model\.norm\.weight"):
        trainer.send(weights, encoding="delta")
    assert same(engine.live(), before)


def test_without_staging_everything_is_sent(engine, checkpoints) -> None:
    trainer = Trainer(engine, "inline")
    trainer.send(checkpoints[2], encoding="delta")
    receipt = trainer.send(checkpoints[2], encoding="delta", staging="none")
    assert receipt.details["encoding_reason"] == "a delta needs staging"
    request = UpdateRequest(
        update_id="x", encoding="delta", base=(7, engine.version), staging="none",
        bucket_bytes=BUCKET, timeout=DEADLINE,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="needs a base, and a shadow"):
        engine.open().begin(request)
    with pytest.raises(ConfigError, match="needs a base"):
        engine.open().begin(replace(request, base=None, staging="auto"))
    with pytest.raises(ConfigError, match="full, delta"):
        engine.open().begin(replace(request, encoding="zip"))
    with pytest.raises(VersionConflict, match="built on"):
        engine.open().begin(replace(request, base=(7, 99), staging="auto"))
    assert engine.info().state == "idle"


def test_a_partial_delta_leaves_the_rest_as_it_was(engine, checkpoints) -> None:
    trainer = Trainer(engine, "ipc")
    trainer.send(checkpoints[2], encoding="delta")
    weights = nudged(checkpoints[2], 0.01)
    part = {name: tensor for name, tensor in weights.items() if "layers.1" in name}
    receipt = trainer.send(part, encoding="delta", partial=True)
    assert receipt.details["encoding"] == "delta"
    mixed = {**checkpoints[2], **part}
    assert same(engine.live(), fresh(engine, checkpoints, "plain", mixed))
    assert trainer.send(weights, encoding="delta").details["encoding"] == "delta"
    assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))


def test_a_tied_head_that_is_sent_too_must_still_be_equal(engine, checkpoints) -> None:
    owner = "model.embed_tokens.weight"
    trainer = Trainer(engine, "inline")
    for fraction in (0.0, 0.01, 0.02):
        weights = nudged(checkpoints[2], fraction)
        head = weights[owner].clone()
        trainer.send(iter([*weights.items(), ("lm_head.weight", head)]), encoding="delta")
    assert same(engine.live(), fresh(engine, checkpoints, "plain", weights))
    with pytest.raises(WeightMismatch, match=r"lm_head\.weight"):
        trainer.send(iter([*weights.items(), ("lm_head.weight", head + 1)]), encoding="delta")


class FarLink:
    """The engine as if it were on another host."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.receipts, self.local_address = engine.receipts, engine.local_address

    def info(self):
        return replace(self._engine.info(), host="far away")

    def open(self):
        return self._engine.open()


def test_auto_sends_changes_to_another_host_and_stops_where_most_change(
    engine,
    checkpoints,
    monkeypatch,
) -> None:
    trainer, far = Trainer(engine, "auto"), FarLink(engine)
    assert trainer.send(checkpoints[2]).details["encoding_reason"].startswith("on one host")
    assert trainer.base.nbytes == 0
    details = [
        trainer.send(weights, link=far).details
        for weights in (checkpoints[2], nudged(checkpoints[2], 0.01), checkpoints[1])
    ]
    assert [d["encoding"] for d in details] == ["full", "delta", "delta"]
    assert details[0]["transport_reason"] == "no ipc: the engine is on another host"
    assert trainer.base.nbytes == 0  # everything had changed
    for _ in range(encodings.REST):
        assert (
            "most elements changed"
            in trainer.send(checkpoints[1], link=far).details["encoding_reason"]
        )
    assert trainer.send(checkpoints[1], link=far).details["encoding"] == "full"
    assert trainer.send(checkpoints[1], link=far).details["encoding"] == "delta"
    monkeypatch.setattr(encodings, "_free_memory", lambda: 1)
    assert "memory" in trainer.send(checkpoints[1], link=far).details["encoding_reason"]


def test_unknown_encodings_and_negative_anchors_are_refused() -> None:
    with pytest.raises(ConfigError, match="auto, full, delta"):
        UpdateOptions(encoding="sparse")
    with pytest.raises(ConfigError, match="anchor_every"):
        UpdateOptions(anchor_every=-1)


def test_finding_and_packing_changes_takes_no_python_loop() -> None:
    old = torch.zeros(8 << 20, dtype=torch.bfloat16)
    new = old.clone()
    new[::100] = 1
    started = time.process_time()
    found = encode(old, new, 1 << 30)
    assert time.process_time() - started < 3
    assert found is not None
    assert found.nbytes <= 0.02 * new.nbytes


# Norms that are added to one, of layers, of heads; fused files; states, beside attention, too; a
# bias on the choice of experts; latents with an index; a tower.
KINDS = (
    *("gemma", "cohere", "glm", "phi3", "qwen3_next", "qwen3_5", "granite_hybrid", "nemotron_h"),
    *("falcon_h1", "kimi_linear", "minimax_m2", "deepseek_v3", "deepseek_v32", "qwen3_vl"),
)


@pytest.mark.parametrize("arch", KINDS)
def test_deltas_of_every_kind_end_like_a_fresh_start(tmp_path, arch) -> None:
    """What is derived from weights, as decays and absorbed projections, is derived anew."""
    write = write_vision if arch == "qwen3_vl" else write_tiny
    model = write(tmp_path, arch)
    config = ModelConfig.from_directory(tmp_path)
    weights = [dict(model.state_dict())]
    weights += [nudged(weights[0], 0.002, seed) for seed in (1, 2)]
    engine = Engine(config, 2, weights[0])
    try:
        trainer = Trainer(engine, "inline")
        trainer.send(weights[0], encoding="delta")
        for held in weights[1:]:
            receipt = trainer.send(held, encoding="delta")
            assert receipt.details["encoding"] == "delta"
            assert receipt.wire_bytes < receipt.num_bytes / 20
            assert same(engine.live(), fresh(engine, [config], "plain", held))
    finally:
        engine.close()
