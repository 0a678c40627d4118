"""OLMo-Hybrid and Kimi-Linear: the forms that their files have, as one set of weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import Session, loaded
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny
from torch import Tensor

from rollout import Rollout
from rollout.distributed import TensorParallel
from rollout.errors import ConfigError, WeightMismatch
from rollout.models.build import build_model
from rollout.models.config.model import ModelConfig
from rollout.models.weight_io.load import WeightLoad
from rollout.models.weight_io.table import ParamSpec, WeightTable
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weights import PLAIN, Box, TensorMeta, TensorPiece, WeightSlot
from rollout.weights.spellings import Spellings
from rollout.weights.wanted import WantedWeights, by_name

PROMPT = [(3 + 7 * j) % 320 for j in range(19)]
CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")


def stored(config: ModelConfig, weights: Any) -> dict[str, Tensor]:
    model = build_model(config, TensorParallel(), torch.float32, "cpu")
    model.load_weights(weights)
    return model.storages()


def whole_cuts(files: dict[str, Tensor], sizes: tuple[int, int, int]) -> dict[str, Tensor]:
    """Files whose convolutions are cut where queries, keys and values end."""
    found = dict(files)
    for name in files:
        if CONVS[0] in name:
            names = [name.replace(CONVS[0], each) for each in CONVS]
            parts = torch.cat([files[each] for each in names]).split(sizes)
            found |= {each: part.contiguous() for each, part in zip(names, parts, strict=True)}
    return found


def test_convolutions_may_be_cut_as_published_or_evenly_or_lie_in_one(tmp_path: Path) -> None:
    source = write_tiny(tmp_path, "olmo_hybrid")
    config = ModelConfig.from_directory(tmp_path)
    assert config.delta is not None
    even = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.linear_attn.q_conv1d.weight"
    published = whole_cuts(even, config.delta.parts)
    assert even[name].shape[0] != published[name].shape[0] == config.delta.parts[0]
    memory = source.state_dict()
    pieces = [
        (n, TensorPiece(tuple(t.shape), t.dtype, box, t[box.slices]))
        for n, t in memory.items()
        for box in (
            Box((0, *[0] * (t.dim() - 1)), (5, *t.shape[1:])),
            Box((5, *[0] * (t.dim() - 1)), tuple(t.shape)),
        )
        if len(t) >= 5 and box.numel
    ]
    small = [(n, t) for n, t in memory.items() if len(t) < 5]
    wanted = stored(config, published.items())
    for weights in (even.items(), memory.items(), [*pieces, *small]):
        found = stored(config, weights)
        assert all(torch.equal(found[name], storage) for name, storage in wanted.items())
    with pytest.raises(WeightMismatch, match="k_conv1d"):
        stored(config, [(n, t) for n, t in even.items() if ".0.linear_attn.k_conv1d" not in n])
    with pytest.raises(WeightMismatch, match=r"q_conv1d\.weight: has shape"):
        stored(config, [(n, t[:7] if "q_conv1d" in n else t) for n, t in even.items()])


PARTS = tuple(f"model.layers.0.linear_attn.{each}.weight" for each in CONVS)
CUTS = dict(zip(PARTS, torch.arange(64.0).view(16, 1, 4).split((4, 4, 8)), strict=True))
EVEN = dict(zip(PARTS, torch.arange(64.0).view(16, 1, 4).split(6), strict=True))


def convolutions() -> tuple[WeightLoad, dict[str, Tensor]]:
    """A load of three convolutions alone, and where it writes them."""
    shapes = {name: tuple(part.shape) for name, part in CUTS.items()}
    slots = {n: (WeightSlot(n, s, Box.full(s), n, Box.full(s)),) for n, s in shapes.items()}
    params = {name: ParamSpec(shape, PLAIN, ()) for name, shape in shapes.items()}
    table = WeightTable(slots, params, {}, spellings=Spellings.of(shapes))
    storages = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return WeightLoad(table, storages, torch.float32), storages


def one_buffer(parts: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each part in the memory of the one before, as what receives or gathers them has it."""
    buffer = torch.empty(24)
    for name, part in parts.items():
        yield name, buffer[: part.numel()].view(part.shape).copy_(part)


def test_even_parts_that_wait_keep_their_values_when_their_memory_is_used_anew() -> None:
    load, storages = convolutions()
    for item in one_buffer(EVEN):
        load.feed([item])
    load.finish()
    assert all(torch.equal(storages[name], part) for name, part in CUTS.items())


def test_even_parts_whose_others_never_come_are_refused_by_name() -> None:
    missing = rf"{PARTS[0]}: cut evenly, .* without {PARTS[1]}, {PARTS[2]}"
    load, _ = convolutions()
    load.feed([(PARTS[0], EVEN[PARTS[0]])])
    with pytest.raises(WeightMismatch, match=missing):
        load.finish(partial=True)
    wanted = tuple(TensorMeta(n, torch.float32, tuple(t.shape)) for n, t in CUTS.items())

    def source(items: Any) -> Any:
        return detect(items).source(WantedWeights(dtype=torch.float32, tensors=by_name(wanted)))

    found = {name: part.clone() for name, part in source(one_buffer(EVEN))}
    assert all(torch.equal(found[name], part) for name, part in CUTS.items())
    with pytest.raises(WeightMismatch, match=missing):
        list(source([(PARTS[0], EVEN[PARTS[0]])]))


def test_even_parts_are_gathered_as_no_rank_holds_a_box_of_what_they_become() -> None:
    module = torch.nn.Module()
    place = module
    for each in PARTS[0].split(".")[:-2]:
        place.add_module(each, torch.nn.Module())
        place = place.get_submodule(each)
    for each, part in zip(CONVS, EVEN.values(), strict=True):
        place.add_module(each, torch.nn.Module())
        place.get_submodule(each).weight = torch.nn.Parameter(part.clone())
    wanted = tuple(TensorMeta(n, torch.float32, tuple(t.shape)) for n, t in CUTS.items())
    source: Any = detect(module).source(WantedWeights(dtype=torch.float32, tensors=by_name(wanted)))
    assert dict(source.local_boxes()) == {name: [] for name in PARTS}
    assert [source.local_values(name) for name in PARTS] == [[], [], []]
    assert source.metadata() == wanted
    assert all(torch.equal(part, CUTS[name]) for name, part in source)


@pytest.mark.parametrize(
    "arch", ["olmo_hybrid", pytest.param("kimi_linear", marks=pytest.mark.more)]
)
def test_an_update_from_files_or_a_module_is_what_a_fresh_start_has(
    tmp_path: Path, arch: str
) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    models = [write_tiny(path, arch, seed=seed) for seed, path in enumerate(paths[:2])]
    settings: Any = {
        "device": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 64,
        "num_kv_blocks": 16, "max_num_seqs": 2, "timeout": 20.0,
    }  # fmt: skip
    greedy = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}

    def sample(rollout: Rollout) -> Any:
        found = rollout.generate(PROMPT, greedy)[0].outputs[0]
        return found.token_ids, found.logprobs.raw

    with Rollout(str(paths[1]), **settings) as fresh:
        wanted = sample(fresh)
    with Rollout(str(paths[0]), **settings) as live:
        first = sample(live)
        assert first != wanted
        live.update_weights(models[1])
        assert sample(live) == wanted
        assert live.check_weights(models[1]).equal
        live.update_weights(str(paths[0]))
        assert sample(live) == first
        with torch.no_grad():
            for parameter in models[0].parameters():
                parameter.view(-1)[:3] += 0.25
        live.update_weights(models[0], encoding="delta")
        assert live.check_weights(models[0]).equal
        changed = sample(live)
        models[0].save_pretrained(paths[2])
    with Rollout(str(paths[2]), **settings) as fresh:
        assert sample(fresh) == changed


@pytest.mark.parametrize("by_half", [True, False])
def test_olmo_hybrid_without_positions_is_what_transformers_computes(
    tmp_path: Path, by_half: bool
) -> None:
    """As its published checkpoint is; and what may be learnt of a token at most."""
    source = write_tiny(
        tmp_path, "olmo_hybrid", rope_parameters={"rope_theta": None, "rope_type": "default"},
        linear_allow_neg_eigval=by_half,
    )  # fmt: skip
    assert source.model.rotary_emb is None
    config = ModelConfig.from_directory(tmp_path)
    assert {layer.rope.kind for layer in config.layers} == {"none"}
    same(source, config)
    for wrong in ([10000.0], "default"):
        with pytest.raises(ConfigError, match="rope_parameters must be an object"):
            ModelConfig.from_hf({**source.config.to_dict(), "rope_parameters": wrong})


def test_kimi_linear_is_read_as_its_files_were_published(tmp_path: Path) -> None:
    source = write_tiny(tmp_path, "kimi_linear")
    config = ModelConfig.from_directory(tmp_path)
    values = source.config.to_dict()
    for name in ("layer_types", "linear_head_dim", "linear_num_heads", "mlp_layer_types"):
        del values[name]
    del values["linear_conv_kernel_dim"]
    published = values | {
        "architectures": config.architecture and [config.architecture],
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "full_attn_layers": [3],
            "kda_layers": [1, 2],
            "head_dim": 12,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    }
    assert ModelConfig.from_hf(published) == config
    for listed, match in (
        ([1], "must name each of the layers 1 to 3 once"),
        ([1, 2, 3], "must name each of the layers 1 to 3 once"),
        ([1, "2"], "kda_layers of linear_attn_config must be a list of integers"),
        ("12", "kda_layers of linear_attn_config must be a list of integers"),
    ):
        wrong = {**published["linear_attn_config"], "kda_layers": listed}
        with pytest.raises(ConfigError, match=match):
            ModelConfig.from_hf({**published, "linear_attn_config": wrong})
    files = load_file(tmp_path / "model.safetensors")
    older = {n.replace("layers.0.block_sparse_moe", "layers.0.mlp"): t for n, t in files.items()}
    assert older.keys() != files.keys()
    save_file(older, tmp_path / "model.safetensors")
    wanted = stored(config, files.items())
    found = stored(config, load_file(tmp_path / "model.safetensors").items())
    assert all(torch.equal(found[name], storage) for name, storage in wanted.items())


def same(source: Any, config: ModelConfig) -> None:
    session = Session(loaded(config, TensorParallel(), source.state_dict()), [PROMPT])
    ours = torch.cat([session.advance([n])[0] for n in (7, 11, 1)]).log_softmax(-1)
    with torch.no_grad():
        theirs = source(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert (ours - theirs).abs().max() < 1e-4
