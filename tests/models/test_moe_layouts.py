"""One mixture of experts in every spelling, at every placement: the same weights, one digest."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from rank_threads import Session, loaded, run_ranks
from safetensors.torch import load_file
from tiny_models import MIXTURES, write_tiny
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from rollout.distributed import TensorParallel
from rollout.errors import WeightMismatch
from rollout.kernels import digest
from rollout.loader import open_checkpoint
from rollout.models.build import build_model, build_tables
from rollout.models.config.model import ModelConfig
from rollout.models.weight_io.table import check_tables
from rollout.weight_sync.protocol.digests import combine, slot_rows
from rollout.weight_sync.protocol.fit import differences
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weights import Box, LazyTensor, SparsePatch, TensorMeta, TensorPiece
from rollout.weights.wanted import WantedWeights, by_name

ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v3")
PLACES = ((1, False), (2, False), (4, False), (2, True), (4, True))
EXPERTS = {
    "qwen3_moe": "model.layers.1.mlp.experts.{}.gate_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.{}.w1.weight",
}
FUSED = "model.layers.1.mlp.experts.{}"


@pytest.fixture(scope="module", params=ARCHITECTURES)
def moe(request, tmp_path_factory):
    """A model in transformers' memory, in a directory of files, and in one of fused files."""
    files, fused = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("fused")
    model = write_tiny(files, request.param)
    write_tiny(fused, request.param, original_format=False)
    return SimpleNamespace(
        arch=request.param,
        model=model,
        files=files,
        fused=fused,
        config=ModelConfig.from_directory(files),
        canonical=load_file(files / "model.safetensors"),
        memory=dict(model.state_dict()),
    )


def spelled(moe, layout: str, wanted) -> Iterator[tuple[str, Tensor | LazyTensor | TensorPiece]]:
    """The weights as a stream; ``wanted`` is what the engine announces."""
    if layout in ("files", "fused files"):
        with open_checkpoint(str(moe.files if layout == "files" else moe.fused)) as checkpoint:
            yield from checkpoint.items()
    elif layout == "live module":
        yield from detect(moe.model).source(
            WantedWeights(dtype=torch.float32, tensors=by_name(wanted))
        )
    elif layout == "live iterable":
        items = iter(moe.memory.items())
        yield from detect(items).source(WantedWeights(dtype=torch.float32, tensors=by_name(wanted)))
    elif layout == "reverted by transformers":
        yield from revert_weight_conversion(moe.model, dict(moe.memory)).items()
    elif layout == "memory names":
        yield from moe.memory.items()
    elif layout == "memory names, transposed":
        for name, tensor in moe.memory.items():
            yield name, tensor.transpose(1, 2).contiguous() if tensor.dim() == 3 else tensor
    elif layout == "memory names, in pieces":
        for name, tensor in moe.memory.items():
            half = -(-len(tensor) // 2)
            for start, stop in ((half, len(tensor)), (0, half)):
                low = (0,) * (tensor.dim() - 1)
                box = Box((start, *low), (stop, *tensor.shape[1:]))
                shape = tuple(tensor.shape)
                yield name, TensorPiece(shape, tensor.dtype, box, tensor[start:stop])
    else:
        raise AssertionError(layout)


LAYOUTS = (
    *("files", "fused files", "live module", "live iterable", "reverted by transformers"),
    *("memory names", "memory names, transposed", "memory names, in pieces"),
)


def ranks_of(moe, size: int, expert_parallel: bool):
    return [
        build_model(
            moe.config,
            TensorParallel(rank, size),
            torch.float32,
            "cpu",
            expert_parallel=expert_parallel,
        )
        for rank in range(size)
    ]


def digests_of(models) -> dict[str, int]:
    rows = [
        slot_rows((s, m.digest_slot(s)) for slots in m.table.slots.values() for s in slots)
        for m in models
    ]
    return combine(rows)


@pytest.mark.parametrize(("size", "expert_parallel"), PLACES)
def test_every_layout_gives_one_digest_and_the_same_bits(moe, size, expert_parallel):
    wanted = {
        name: digest(tensor, tuple(tensor.shape), Box.full(tuple(tensor.shape)))
        for name, tensor in moe.canonical.items()
    }
    cold = ranks_of(moe, size, expert_parallel)
    for layout in LAYOUTS:
        models = cold if layout == "files" else ranks_of(moe, size, expert_parallel)
        for model in models:
            report = model.load_weights(spelled(moe, layout, model.weight_metadata()))
            assert report.loaded == set(wanted)
        assert digests_of(models) == wanted, layout
        for model, first in zip(models, cold, strict=True):
            for (name, a), (_, b) in zip(
                model.named_parameters(), first.named_parameters(), strict=True
            ):
                assert torch.equal(a, b), f"{layout}: {name}"


@pytest.mark.parametrize("arch", [name for name in MIXTURES if name not in ARCHITECTURES])
def test_files_in_the_names_of_transformers_memory_give_the_same_bits(tmp_path, arch):
    """Of every other mixture, as ``save_pretrained(save_original_format=False)`` writes them."""
    model = write_tiny(tmp_path / "files", arch)
    write_tiny(tmp_path / "memory", arch, original_format=False)
    config = ModelConfig.from_directory(tmp_path / "files")
    assert set(load_file(tmp_path / "memory" / "model.safetensors")) == set(model.state_dict())
    for rank, size, split in ((0, 1, False), (1, 2, False), (1, 2, True)):
        made = []
        for files in ("files", "memory"):
            built = build_model(
                config, TensorParallel(rank, size), torch.float32, "cpu", expert_parallel=split
            )
            with open_checkpoint(str(tmp_path / files)) as checkpoint:
                built.load_weights(checkpoint.items())
            made.append(built.storages())
        assert all(torch.equal(made[0][name], storage) for name, storage in made[1].items())


@pytest.mark.parametrize(("size", "expert_parallel"), PLACES)
def test_the_ranks_cover_every_tensor_exactly_once(moe, size, expert_parallel):
    tables = build_tables(moe.config, size, expert_parallel=expert_parallel)
    check_tables(tables)
    for table in tables:
        assert set(table.slots) == set(moe.canonical)
        assert {n: table.shape_of(n) for n in table.slots} == {
            n: tuple(t.shape) for n, t in moe.canonical.items()
        }


def test_expert_parallel_ranks_read_only_their_own_experts(moe):
    """Of a fused file each rank reads its boxes alone; no byte of another rank's experts."""
    total = moe.config.moe.num_experts
    models = ranks_of(moe, 4, True)
    kept = [model.get_parameter(name).shape[0] for model in models for name in [expert_name(model)]]
    assert sum(kept) == total
    assert kept == [1, 2, 1, 2]
    for model in models:
        with open_checkpoint(str(moe.fused)) as checkpoint:
            model.load_weights(checkpoint.items())
            mine = sum(p.numel() for p in model.parameters()) * 4
            assert checkpoint.bytes_read <= mine


def expert_name(model) -> str:
    return next(name for name, _ in model.named_parameters() if name.endswith("experts.w13"))


def test_a_source_announces_and_sends_the_same_file_form(moe):
    model = ranks_of(moe, 1, False)[0]
    source = detect(moe.model).source(
        WantedWeights(dtype=torch.float32, tensors=by_name(model.weight_metadata()))
    )
    announced = source.metadata()
    assert {(m.name, m.shape) for m in announced} == {
        (m.name, m.shape) for m in model.weight_metadata()
    }
    sent = [(name, tuple(tensor.shape)) for name, tensor in source]
    assert sent == [(m.name, m.shape) for m in announced]
    held = dict(source.local_boxes())
    assert held == {m.name: [Box.full(m.shape)] for m in announced}
    # Views of the trainer's own memory, not copies.
    storages = {t.untyped_storage().data_ptr() for t in moe.memory.values()}
    assert all(tensor.untyped_storage().data_ptr() in storages for _, tensor in source)


def test_a_patch_of_a_fused_tensor_changes_the_same_elements(moe):
    generator = torch.Generator().manual_seed(5)
    changed, patches = {}, []
    for name, tensor in moe.memory.items():
        flat = tensor.clone().flatten()
        positions = torch.randperm(flat.numel(), generator=generator)[: flat.numel() // 50 + 1]
        positions = positions.sort().values
        flat[positions] = torch.randn(len(positions), generator=generator)
        changed[name] = flat.view(tensor.shape)
        shape = tuple(tensor.shape)
        patches.append((name, SparsePatch(shape, flat.dtype, positions, flat[positions])))
    for size, expert_parallel in ((1, False), (2, False), (2, True)):
        patched = ranks_of(moe, size, expert_parallel)
        fresh = ranks_of(moe, size, expert_parallel)
        for a, b in zip(patched, fresh, strict=True):
            a.load_weights(moe.memory.items())
            a.load_weights(patches)
            b.load_weights(changed.items())
        assert digests_of(patched) == digests_of(fresh)


def test_logits_are_the_same_bits_whatever_the_layout(moe):
    sequences = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5]]

    def logits(weights, expert_parallel):
        def work(tp):
            model = loaded(moe.config, tp, weights, expert_parallel=expert_parallel)
            return torch.cat(Session(model, sequences).advance([8, 3]))

        return run_ranks(2, work)[0]

    for expert_parallel in (False, True):
        assert torch.equal(
            logits(moe.canonical, expert_parallel), logits(moe.memory, expert_parallel)
        )


def refused(moe, items) -> str:
    with pytest.raises(WeightMismatch) as caught:
        ranks_of(moe, 1, False)[0].load_weights(items)
    return str(caught.value)


def test_an_unknown_expert_is_refused_and_names_its_nearest(moe):
    pattern = EXPERTS.get(moe.arch, EXPERTS["qwen3_moe"])
    text = refused(moe, {**moe.canonical, pattern.format(6): torch.zeros(24, 64)}.items())
    assert f"unknown tensor {pattern.format(6)!r}; the nearest known is " in text
    assert pattern.rsplit("{}", 1)[1] in text.split("nearest known is")[1]


def test_names_match_by_whole_components_alone(moe):
    for name in (
        "model.layers.1.mlp.experts.gate_up_proj.weight",
        "model.layers.1.mlp.experts.up_proj",
        "model.layers.1.mlp.experts.gate_up_proj_bias",
        "model.layers.1.mlp.my_experts.gate_up_proj",
    ):
        text = refused(moe, {**moe.memory, name: torch.zeros(6, 48, 64)}.items())
        assert f"unknown tensor {name!r}" in text


def test_missing_experts_are_named_in_file_form(moe):
    pattern = EXPERTS.get(moe.arch, EXPERTS["qwen3_moe"])
    weights = {k: v for k, v in moe.canonical.items() if k != pattern.format(3)}
    assert f"not initialized from checkpoint: {{'{pattern.format(3)}'}}" in refused(
        moe, weights.items()
    )
    weights = {k: v for k, v in moe.memory.items() if k != FUSED.format("gate_up_proj")}
    text = refused(moe, weights.items())
    assert all(f"'{pattern.format(index)}'" in text for index in range(4))
    assert " and 4 more}" in text


def test_both_spellings_of_a_tensor_are_a_duplicate(moe):
    pattern = EXPERTS.get(moe.arch, EXPERTS["qwen3_moe"])
    fused = FUSED.format("gate_up_proj")
    text = refused(moe, [*moe.canonical.items(), (fused, moe.memory[fused])])
    assert f"{fused}: {pattern.format(0)}: was sent twice (and so on for 11 more" in text
    text = refused(
        moe, [*moe.memory.items(), (pattern.format(2), moe.canonical[pattern.format(2)])]
    )
    assert f"{pattern.format(2)}: was sent twice" in text
    assert "experts.1." not in text
    text = refused(moe, [*moe.memory.items(), (fused, moe.memory[fused])])
    assert "was sent twice" in text


def test_a_fused_tensor_of_another_shape_is_refused(moe):
    fused = FUSED.format("gate_up_proj")
    for shape in ((5, 48, 64), (6, 64, 64), (6, 24, 64), (6, 48)):
        text = refused(moe, {**moe.memory, fused: torch.zeros(shape)}.items())
        assert f"{fused}: has shape {shape}, the model needs (6, 48, 64)" in text
        assert "transposed, (6, 64, 48)" in text
    model = ranks_of(moe, 1, False)[0]
    weights = {**moe.memory, fused: torch.zeros(5, 48, 64)}
    wanted = model.weight_metadata()
    with pytest.raises(WeightMismatch, match=r"has shape \(5, 48, 64\)"):
        detect(weights).source(
            WantedWeights(dtype=torch.float32, tensors=by_name(wanted))
        ).metadata()
    with pytest.raises(WeightMismatch, match=r"has shape \(5, 48, 64\)"):
        list(detect(weights).source(WantedWeights(dtype=torch.float32, tensors=by_name(wanted))))


@pytest.mark.parametrize(
    ("inner", "square"), [(32, "gate_up_proj"), (64, "down_proj")], ids=("2 I = H", "I = H")
)
def test_a_square_tensor_beside_a_transposed_one_is_ambiguous(tmp_path, inner, square):
    model = write_tiny(tmp_path, "qwen3_moe", moe_intermediate_size=inner, num_layers=1)
    weights = model.state_dict()
    config = ModelConfig.from_directory(tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    engine = build_model(config, TensorParallel(), torch.float32, "cpu")
    engine.load_weights(weights.items())  # as transformers holds them: its own layout wins
    held = digests_of([engine])
    assert held == {
        n: digest(t, tuple(t.shape), Box.full(tuple(t.shape))) for n, t in wanted.items()
    }
    turned = {n: t.transpose(1, 2).contiguous() if t.dim() == 3 else t for n, t in weights.items()}
    name = f"model.layers.0.mlp.experts.{square}"
    for stream in (list(turned.items()), list(turned.items())[::-1]):
        fresh = build_model(config, TensorParallel(), torch.float32, "cpu")
        with pytest.raises(WeightMismatch, match=f"{name}: shape .* is the same transposed"):
            fresh.load_weights(stream)


def test_the_check_before_an_update_reads_either_spelling(moe):
    """A peer that announces transformers' own names is judged in file form all the same."""
    tensors = by_name(ranks_of(moe, 1, False)[0].weight_metadata())
    wanted = WantedWeights(dtype=torch.float32, tensors=tensors)

    def announced(weights):
        return [TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in weights.items()]

    assert differences(announced(moe.memory), wanted) == []
    fused = FUSED.format("gate_up_proj")
    twice = differences([*announced(moe.memory), *announced({fused: moe.memory[fused]})], wanted)
    assert len(twice) == 12
    assert all("is sent 2 times" in line for line in twice)
    without = {k: v for k, v in moe.memory.items() if k != fused}
    assert len(differences(announced(without), wanted)) == 12
    assert differences(announced(without), wanted, partial=True) == []
    said = differences(announced({**moe.memory, fused: torch.zeros(5, 48, 64)}), wanted)
    assert f"{fused}: has shape (5, 48, 64)" in said[0]
