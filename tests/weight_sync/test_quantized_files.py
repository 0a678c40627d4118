"""Files and trainers that have codes and scales: kept as they are, at a start and live."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_ranks import Engine, same
from quantized_files import DTYPES, write_release
from safetensors.torch import load_file
from trainer import DEADLINE, Trainer

from rollout.errors import ChecksumMismatch, WeightMismatch
from rollout.loader import open_checkpoint
from rollout.models.config.model import ModelConfig
from rollout.testing.faults import Fault, Faulty
from rollout.weight_sync.protocol.digests import total
from rollout.weight_sync.trainer.weight_report import check_weights
from rollout.weights.packed_rows import CODES, pack_rows, unpack_rows
from rollout.weights.quantization import SCHEMES

SHAPE = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 160,
    "intermediate_size": 256, "num_hidden_layers": 1,
}  # fmt: skip


@pytest.fixture(
    scope="module", params=[("fp8_block", 1), ("fp8_block", 2), ("fp8", 2), ("int8", 2)]
)
def case(request, tmp_path_factory):
    """Two releases of a scheme, and an engine that has started from the first."""
    scheme, size = request.param
    where = tmp_path_factory.mktemp("releases")
    paths = [where / str(seed) for seed in (0, 1)]
    for seed, path in enumerate(paths):
        write_release(path, scheme, seed=seed, **SHAPE)
    engine = started(paths[0], scheme, size)
    yield scheme, engine, paths
    engine.close()


def started(path: Path, scheme: str, size: int) -> Engine:
    with open_checkpoint(str(path)) as checkpoint:
        config = ModelConfig.from_directory(path)
        return Engine(config, size, checkpoint, quantization=scheme)


def fresh(path: Path, engine: Engine, scheme: str):
    other = started(path, scheme, len(engine.ranks))
    try:
        return other.live()
    finally:
        other.close()


def files_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def floats_of(path: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(str(path)) as checkpoint:
        return {n: lazy.read(whole(lazy)) for n, lazy in checkpoint.items()}


def whole(lazy):
    from rollout.weights import Box

    return Box.full(lazy.shape)


def assert_codes_are_the_files(engine: Engine, path: Path, scheme: str) -> None:
    """Bit for bit, whatever the layout, and the scale of each element is its block's."""
    files = files_of(path)
    for rank in engine.ranks:
        model, seen = rank.instances.live, 0
        for slot in model.table.quantized:
            scales = next(files[slot.source + end] for end in ("_scale_inv", "_scale")
                          if slot.source + end in files).float()  # fmt: skip
            block = (128, 128) if scheme == "fp8_block" else (1, slot.shape[1])
            for axis, size in enumerate(block):
                scales = scales.repeat_interleave(size, axis).narrow(axis, 0, slot.shape[axis])
            wanted = (files[slot.source].float() * scales)[slot.take.slices]
            assert torch.equal(model.read_slot(slot), wanted), slot.source
            seen += 1
        assert seen == 7


def test_a_start_keeps_the_codes_and_scales_of_the_files(case) -> None:
    scheme, engine, paths = case
    Trainer(engine, "inline").send(str(paths[0]))
    assert_codes_are_the_files(engine, paths[0], scheme)
    assert same(engine.live(), fresh(paths[0], engine, scheme))


def test_a_directory_a_dict_and_a_stream_leave_what_a_start_leaves(case) -> None:
    scheme, engine, paths = case
    wanted = fresh(paths[1], engine, scheme)
    for source in (str(paths[1]), files_of(paths[1]), reversed(files_of(paths[1]).items())):
        Trainer(engine, "inline").send(str(paths[0]))
        assert not same(engine.live(), wanted)
        receipt = Trainer(engine, "inline").send(source)
        assert same(engine.live(), wanted)
        assert total(engine.digests(DEADLINE).values()) == receipt.digest
    assert check(engine, str(paths[1])).equal
    assert check(engine, files_of(paths[1])).equal
    assert not check(engine, str(paths[0])).equal


def check(engine, source):
    return check_weights(source, connect=lambda: engine, timeout=DEADLINE)


def test_floats_of_the_same_values_are_another_source(case) -> None:
    """Quantised anew at a start and live alike; a delta between the two forms keeps neither."""
    scheme, engine, paths = case
    values = floats_of(paths[1])
    alone = Engine(engine_config(paths), len(engine.ranks), values, quantization=scheme)
    wanted = alone.live()
    alone.close()
    trainer = Trainer(engine, "inline")
    for source, left in 2 * [(values, wanted), (str(paths[1]), fresh(paths[1], engine, scheme))]:
        trainer.send(source, encoding="delta")
        assert same(engine.live(), left)
    assert not same(wanted, engine.live())


def engine_config(paths):
    return ModelConfig.from_directory(paths[0])


def test_a_delta_sends_whole_what_changed_of_the_codes_and_a_rollback_goes_back(case) -> None:
    _, engine, paths = case
    trainer, files = Trainer(engine, "inline"), files_of(paths[0])
    full = trainer.send(files, encoding="delta")
    before, name = engine.live(), engine.info().quantized[2]
    files[name].view(torch.uint8)[3, 5] ^= 1
    receipt = trainer.send(files, encoding="delta")
    assert receipt.details["encoding"] == "delta"
    assert files[name].nbytes < receipt.wire_bytes < full.wire_bytes / 2
    assert not same(engine.live(), before)
    assert total(engine.digests(DEADLINE).values()) == receipt.digest
    engine.rollback(DEADLINE)
    assert same(engine.live(), before)
    assert total(engine.digests(DEADLINE).values()) == full.digest


def test_rows_that_buckets_cut_are_put_together(case) -> None:
    scheme, engine, paths = case
    Trainer(engine, "inline").send(str(paths[1]), bucket_bytes=4096)
    small = Trainer(engine, "inline").send(str(paths[0]), bucket_bytes=4096)
    assert small.transport == "inline"
    assert same(engine.live(), fresh(paths[0], engine, scheme))


def test_a_flipped_bit_of_a_code_does_not_pass(case) -> None:
    _, engine, paths = case
    before = engine.live()
    with pytest.raises(ChecksumMismatch):
        Trainer(engine, "inline").send(
            files_of(paths[1]), transport=Faulty("inline", Fault("flip", bucket=2))
        )
    assert same(engine.live(), before)


def test_codes_without_scales_and_scales_that_are_none_are_refused(case) -> None:
    _, engine, paths = case
    before, files = engine.live(), files_of(paths[1])
    name = engine.info().quantized[0]
    scales = next(n for n in files if n.startswith(f"{name}_scale"))
    with pytest.raises(WeightMismatch, match=f"{name} has dtype .* without its"):
        Trainer(engine, "inline").send({n: t for n, t in files.items() if n != scales})
    with pytest.raises(WeightMismatch, match=f"{name} .*scales of shape"):
        Trainer(engine, "inline").send({**files, scales: torch.ones(3, 1)})
    files[scales].view(-1)[0] = float("nan")
    with pytest.raises(WeightMismatch, match=f"{name} .*NaN or infinity|{name} \\("):
        Trainer(engine, "inline").send(files)
    assert same(engine.live(), before)


def test_codes_of_another_grid_are_quantised_anew_as_a_start_does(case, tmp_path) -> None:
    scheme, engine, _ = case
    other = {"fp8_block": "int8", "fp8": "fp8_block", "int8": "fp8"}[scheme]
    write_release(tmp_path, other, seed=3, **SHAPE)
    wanted = fresh(tmp_path, engine, scheme)
    for source in (str(tmp_path), files_of(tmp_path)):
        Trainer(engine, "inline").send(source)
        assert same(engine.live(), wanted)


def test_bytes_of_rows_come_back() -> None:
    for scheme in SCHEMES.values():
        codes, scales = scheme.quantize(torch.randn(130, 192))
        again = unpack_rows(pack_rows(codes, scales), (130, 192), scheme)
        assert all(map(torch.equal, again, (codes, scales)))
    assert set(CODES) == set(DTYPES.values())
