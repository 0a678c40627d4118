"""gpt-oss as it is released: experts whose codes and scales are kept, at a start and live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_ranks import Engine, same
from quantized_files import write_mxfp4_release
from trainer import DEADLINE, Trainer

from rollout.errors import WeightMismatch
from rollout.loader import open_checkpoint
from rollout.models.config.model import ModelConfig
from rollout.weight_sync.protocol.digests import total
from rollout.weight_sync.trainer.weight_report import check_weights
from rollout.weights import Box

SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 1}
RANKS = 2
Files = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def releases(tmp_path_factory) -> list[tuple[Path, Files]]:
    where = tmp_path_factory.mktemp("releases")
    return [
        (where / str(seed), write_mxfp4_release(where / str(seed), seed=seed, **SHAPE))
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def engine(releases) -> Iterator[Engine]:
    engine = started(releases[0][0])
    yield engine
    engine.close()


def started(path: Path, scheme: str = "mxfp4") -> Engine:
    with open_checkpoint(str(path)) as checkpoint:
        return Engine(ModelConfig.from_directory(path), RANKS, checkpoint, quantization=scheme)


def live_of(engine: Engine):
    try:
        return engine.live()
    finally:
        engine.close()


def floats_of(path: Path) -> Files:
    with open_checkpoint(str(path)) as checkpoint:
        return {n: lazy.read(Box.full(lazy.shape)) for n, lazy in checkpoint.items()}


def test_a_start_keeps_the_codes_and_scales_of_the_files(releases, engine) -> None:
    path, files = releases[0]
    assert ModelConfig.from_directory(path).quantization == "mxfp4"
    Trainer(engine, "inline").send(str(path))
    names = {slot.source for slot in engine.ranks[0].instances.live.table.quantized}
    assert names == {
        f"model.layers.0.mlp.experts.{index}.{linear}.weight"
        for index in range(6)
        for linear in ("gate_up_proj", "down_proj")
    }
    prefix = "model.layers.0.mlp.experts"
    for rank, each in enumerate(engine.ranks):
        held = each.instances.live.storages()
        for param, name, axis in (("w13", "gate_up_proj", 1), ("w2", "down_proj", 2)):
            blocks, scales = (files[f"{prefix}.{name}_{kind}"] for kind in ("blocks", "scales"))
            blocks, scales = (part.chunk(RANKS, dim=axis)[rank] for part in (blocks, scales))
            assert torch.equal(held[f"{prefix}.{param}"], blocks.flatten(2))
            assert torch.equal(held[f"{prefix}.{param}_scale"], scales)


def test_a_directory_a_dict_and_a_stream_leave_what_a_start_leaves(releases, engine) -> None:
    (first, _), (path, files) = releases
    wanted = live_of(started(path))
    for source in (str(path), files, reversed(files.items()), {"policy": str(path)}):
        Trainer(engine, "inline").send(str(first))
        assert not same(engine.live(), wanted)
        receipt = Trainer(engine, "inline").send(source)
        assert same(engine.live(), wanted)
        assert total(engine.digests(DEADLINE).values()) == receipt.digest
    assert check(engine, str(path)).equal
    assert check(engine, files).equal
    assert not check(engine, str(first)).equal


def check(engine, source):
    return check_weights(source, connect=lambda: engine, timeout=DEADLINE)


def test_a_trainers_floats_are_quantised_as_a_start_from_floats_does(releases, engine) -> None:
    path, _ = releases[1]
    values = floats_of(path)
    config = ModelConfig.from_directory(path)
    wanted = live_of(Engine(config, RANKS, values, quantization="mxfp4"))
    codes = live_of(started(path))
    trainer = Trainer(engine, "inline")
    for source, left in 2 * [(values, wanted), (str(path), codes)]:
        trainer.send(source, encoding="delta")
        assert same(engine.live(), left)
    assert not same(wanted, codes)


def test_a_delta_sends_the_experts_whose_codes_changed_and_a_rollback_goes_back(
    releases, engine
) -> None:
    trainer, files = Trainer(engine, "inline"), {n: t.clone() for n, t in releases[0][1].items()}
    full = trainer.send(files, encoding="delta")
    before = engine.live()
    files["model.layers.0.mlp.experts.down_proj_blocks"][3, 5, 1, 7] ^= 1
    receipt = trainer.send(files, encoding="delta")
    assert receipt.details["encoding"] == "delta"
    assert receipt.wire_bytes < 64 * (32 + 2) + 256  # one expert's rows: codes and two scales
    assert not same(engine.live(), before)
    assert total(engine.digests(DEADLINE).values()) == receipt.digest
    engine.rollback(DEADLINE)
    assert same(engine.live(), before)
    assert total(engine.digests(DEADLINE).values()) == full.digest


def test_an_engine_of_floats_takes_codes_as_what_they_stand_for(releases) -> None:
    (first, _), (path, files) = releases
    wanted = live_of(started(path, "none"))
    engine = started(first, "none")
    try:
        Trainer(engine, "inline").send(files)
        assert same(engine.live(), wanted)
    finally:
        engine.close()


def test_codes_without_scales_and_scales_that_do_not_fit_are_refused(releases, engine) -> None:
    before, files = engine.live(), releases[1][1]
    name = "model.layers.0.mlp.experts.down_proj"
    scales = f"{name}_scales"
    with pytest.raises(WeightMismatch, match=f"{name}_blocks has dtype .* without its {scales}"):
        Trainer(engine, "inline").send({n: t for n, t in files.items() if n != scales})
    with pytest.raises(WeightMismatch, match=f"{scales} came without its {name}"):
        Trainer(engine, "inline").send({n: t for n, t in files.items() if n != f"{name}_blocks"})
    with pytest.raises(WeightMismatch, match=f"{name}_blocks .* came with scales of shape"):
        Trainer(engine, "inline").send({**files, scales: files[scales][:, :1]})
    nan = files[scales].clone()
    nan[1, 2] = 255
    with pytest.raises(WeightMismatch, match=r"experts\.1\.down_proj\.weight"):
        Trainer(engine, "inline").send({**files, scales: nan})
    assert same(engine.live(), before)
