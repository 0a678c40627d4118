"""Models written elsewhere, to vLLM's contract, loaded and updated through full tensors."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from rank_threads import Session, run_ranks
from safetensors.torch import save_file

from rollout import EngineConfig, Rollout, SamplingParams
from rollout.distributed import TensorParallel
from rollout.errors import ConfigError, InvalidRequest, WeightMismatch
from rollout.kernels import digest
from rollout.models.build import build_model, build_tables
from rollout.models.config.model import ModelConfig
from rollout.models.registry import Registry
from rollout.models.weight_io.table import check_tables
from rollout.server.preflight import check
from rollout.weight_sync.protocol.digests import combine, slot_rows
from rollout.weights import Box, LazyTensor, SparsePatch, TensorMeta, TensorPiece

HIDDEN, INNER, VOCAB, LAYERS = 16, 24, 37, 2
CONFIG = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128, "dtype": "float32",
}  # fmt: skip


def weights_of(seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (VOCAB, HIDDEN), "head.weight": (VOCAB, HIDDEN)}
    for index in range(LAYERS):
        shapes |= {
            f"blocks.{index}.norm": (HIDDEN,),
            f"blocks.{index}.gate_proj.weight": (INNER, HIDDEN),
            f"blocks.{index}.up_proj.weight": (INNER, HIDDEN),
            f"blocks.{index}.down_proj.weight": (HIDDEN, INNER),
        }
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def registry_of(name: str) -> Registry:
    return Registry().register_model(name, f"out_of_tree:{name}")


def make(name: str, tp: TensorParallel, device: str = "cpu"):
    registry = registry_of(name)
    config = ModelConfig.from_hf({**CONFIG, "architectures": [name]}, registry=registry)
    return build_model(config, tp, torch.float32, device, registry=registry, tensors=metas)


def metas() -> list[TensorMeta]:
    return [TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in weights_of().items()]


def digests_of(models) -> dict[str, int]:
    return combine(
        [
            slot_rows((s, m.digest_slot(s)) for slots in m.table.slots.values() for s in slots)
            for m in models
        ]
    )


def whole(weights) -> dict[str, int]:
    return {n: digest(t, tuple(t.shape), Box.full(tuple(t.shape))) for n, t in weights.items()}


def expected(weights, ids) -> torch.Tensor:
    x = weights["embed.weight"][ids]
    for index in range(LAYERS):
        part = {k: weights[f"blocks.{index}.{k}.weight"] for k in ("gate_proj", "up_proj")}
        y = x * weights[f"blocks.{index}.norm"]
        y = F.silu(y @ part["gate_proj"].T) * (y @ part["up_proj"].T)
        x = x + y @ weights[f"blocks.{index}.down_proj.weight"].T
    return x @ weights["head.weight"].T


@pytest.mark.parametrize("name", ["OutsideForCausalLM", "OwnLoading"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_it_loads_whole_tensors_and_computes_with_them(name, size):
    weights = weights_of()

    def work(tp):
        model = make(name, tp)
        report = model.load_weights(weights.items())
        assert report.loaded == set(weights)
        return model, Session(model, [[3, 1, 4, 1, 5]]).advance([5])[0]

    results = run_ranks(size, work)
    for model, logits in results:
        torch.testing.assert_close(
            logits, expected(weights, torch.tensor([3, 1, 4, 1, 5])), rtol=1e-4, atol=1e-4
        )
        if name == "OwnLoading":
            assert model.inner.given == [(n, tuple(t.shape)) for n, t in weights.items()]
    assert digests_of([model for model, _ in results]) == whole(weights)


def test_every_rank_learns_a_table_that_is_whole():
    registry = registry_of("OwnLoading")
    config = ModelConfig.from_hf({**CONFIG, "architectures": ["OwnLoading"]}, registry=registry)
    for size in (1, 2, 4):
        check_tables(build_tables(config, size, torch.float32, registry=registry, tensors=metas))


@pytest.mark.parametrize("name", ["OutsideForCausalLM", "OwnLoading"])
def test_lazy_tensors_pieces_and_patches_get_in_too(name):
    weights, later = weights_of(), weights_of(1)
    lazy = {
        n: LazyTensor(tuple(t.shape), t.dtype, lambda box, t=t: t[box.slices])
        for n, t in weights.items()
    }
    for size in (1, 2):
        models = [make(name, TensorParallel(rank, size)) for rank in range(size)]
        for model in models:
            model.load_weights(lazy.items())
        assert digests_of(models) == whole(weights)
        for model in models:
            model.load_weights(pieces_of(later))
        assert digests_of(models) == whole(later)
        for model in models:
            shadow = model.empty_like()
            shadow.load_weights(later.items())
            shadow.load_weights(
                (n, SparsePatch(tuple(t.shape), t.dtype, torch.tensor([3]), torch.tensor([9.0])))
                for n, t in later.items()
            )
            changed = {n: t.clone() for n, t in later.items()}
            for tensor in changed.values():
                tensor.view(-1)[3] = 9.0
            fresh = model.empty_like()
            fresh.load_weights(changed.items())
            for a, b in zip(shadow.parameters(), fresh.parameters(), strict=True):
                assert torch.equal(a, b)


def pieces_of(weights):
    for name, tensor in weights.items():
        half, low = len(tensor) // 2, (0,) * (tensor.dim() - 1)
        for start, stop in ((half, len(tensor)), (0, half)):
            box = Box((start, *low), (stop, *tensor.shape[1:]))
            yield name, TensorPiece(tuple(tensor.shape), tensor.dtype, box, tensor[start:stop])


def test_mistakes_are_named_as_for_any_model():
    weights = weights_of()
    model = make("OwnLoading", TensorParallel())
    with pytest.raises(
        WeightMismatch, match=r"unknown tensor 'blocks\.5\.norm'.*'blocks\.1\.norm'"
    ):
        model.load_weights({**weights, "blocks.5.norm": torch.zeros(HIDDEN)}.items())
    del weights["blocks.1.norm"]
    with pytest.raises(WeightMismatch, match=r"not initialized .*blocks\.1\.norm"):
        model.load_weights(weights.items())
    with pytest.raises(WeightMismatch, match=r"head\.weight: has shape \(5,\)"):
        model.load_weights({**weights_of(), "head.weight": torch.zeros(5)}.items())


def test_loading_that_cannot_be_verified_is_refused():
    with pytest.raises(WeightMismatch, match=r"Doubling loads by more than copying.*embed\.weight"):
        make("Doubling", TensorParallel())
    with pytest.raises(WeightMismatch, match=r"blocks\.0\.norm: 8 of 16 elements are not covered"):
        make("Forgetful", TensorParallel())
    with pytest.raises(ConfigError, match="not a model class"):
        build_model(
            ModelConfig.from_hf({**CONFIG, "architectures": ["X"]}, registry=registry_of("X")),
            TensorParallel(),
            torch.float32,
            "cpu",
            registry=Registry().register_model("X", "out_of_tree:torch"),
        )


def test_an_engine_serves_and_updates_an_installed_one(tmp_path, monkeypatch):
    """Found by its entry point; live update equals a fresh start from the same weights."""
    package = tmp_path / "outside_models-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-models\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[rollout.models]\nOwnLoading = out_of_tree:OwnLoading\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        save_file(weights_of(seed), tmp_path / str(seed) / "model.safetensors")
        config = json.dumps({**CONFIG, "architectures": ["OwnLoading"]})
        (tmp_path / str(seed) / "config.json").write_text(config)
    settings = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 16, "max_model_len": 64}
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)

    def sample(engine):
        found = engine.generate([[1, 2, 3]], greedy)[0].outputs[0]
        return list(found.token_ids), list(found.logprobs.raw)

    facts = check(EngineConfig(model=str(tmp_path / "0"), tensor_parallel_size=2, **settings))
    assert facts.num_tensors == len(weights_of())
    with Rollout(str(tmp_path / "0"), **settings) as live:
        before = sample(live)
        with pytest.raises(InvalidRequest, match="no hidden states"):
            live.embed([1, 2, 3])
        receipt = live.update_weights(weights_of(1), bucket_bytes=4096, timeout=10)
        assert receipt.num_tensors == len(weights_of())
        assert live.check_weights(weights_of(1)).equal
        after = sample(live)
    with Rollout(str(tmp_path / "1"), **settings) as cold:
        assert cold.check_weights(weights_of(1)).equal
        assert sample(cold) == after != before
