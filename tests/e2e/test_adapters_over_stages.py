"""Adapters on the stages of a pipeline, which answer as one stage with them, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import adapted, shaken
from start_engines import start
from tiny_models import write_tiny
from trainer_processes import Job

from rollout import Rollout, SamplingParams
from rollout.distributed import TensorParallel
from rollout.distributed.stage import place_of
from rollout.engine.updates.live_weights import live_adapters
from rollout.errors import ConfigError, InvalidRequest, WeightMismatch
from rollout.models.build import build_model, slots_beside
from rollout.models.config.model import ModelConfig
from rollout.models.weight_io.table import check_tables
from rollout.weights.adapters import (
    BIASED,
    DORA,
    EMBEDDING,
    EXPERTS,
    LINEAR,
    AdapterSpec,
    ModuleSpec,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings("ignore:.*tie"),
    pytest.mark.usefixtures("forked_ranks"),
]

VOCABULARY = ["embed_tokens", "lm_head"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed": {"use_dora": True, "target_modules": ["o_proj", "down_proj", "q_proj"]},
    "biased": {"r": 2, "lora_bias": True, "target_modules": ["k_proj", "o_proj"]},
    "early": {"layers_to_transform": [0]},
    "late": {"layers_to_transform": [2], "r": 2},
}
WORDS: dict[str, dict[str, Any]] = {
    "both": {"target_modules": [*VOCABULARY, "v_proj"]},
    "head": {"target_modules": ["lm_head"], "use_dora": True},
    "words": {"target_modules": ["embed_tokens"], "r": 2},
}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OF_MIXTURES: dict[str, dict[str, Any]] = {
    "experts": {"target_modules": [], "target_parameters": STACKS},
    "down": {"r": 2, "target_modules": ["q_proj"], "target_parameters": STACKS[1:]},
    "normed": KINDS["normed"] | {"target_modules": ["o_proj", "q_proj"]},
    "words": WORDS["both"],
}
EVERYTHING: dict[str, Any] = {
    "max_adapters": 2, "max_cpu_loras": 8, "lora_embeddings": True, "lora_experts": True
}  # fmt: skip
WHERE = torch.float32, "cpu"
LAST = "model.layers.2.self_attn.o_proj"
SMALL = ModuleSpec(rank=1, scaling=0.5, kind=DORA)
FEW = AdapterSpec(modules={LAST: SMALL})
PROMPTS = [list(range(3, 40)), list(range(50, 70))]
SETTINGS: dict[str, Any] = {"block_size": 8, "max_lora_rank": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Of three layers: the second stage has two."""
    path = tmp_path_factory.mktemp("base") / "checkpoint"
    write_tiny(path, "qwen3", tied=True, num_layers=3)
    return path


@pytest.fixture(scope="module")
def engines(base) -> Iterator[list[Rollout]]:
    """Of one stage, and of two."""
    settings = {**SETTINGS, "max_adapters": 8, "lora_embeddings": True}
    with both(base, settings, {}) as started:
        yield started


@contextmanager
def both(base: Path, settings: dict[str, Any], ranks: dict[str, int]) -> Iterator[list[Rollout]]:
    """An engine of one stage, and one of two, or as ``ranks`` says."""
    stages = {"tp": 1, "pipeline_parallel_size": 2, **ranks}
    with (
        start(base, stages["tp"], **settings) as whole,
        start(base, **stages, **settings) as cut,
    ):
        yield [whole, cut]


def said(rollout: Rollout, names: list[str | None]) -> list[Any]:
    rollout.reset_prefix_cache()
    params = [
        SamplingParams(adapter=name, temperature=0, max_tokens=6, ignore_eos=True) for name in names
    ]
    outputs = rollout.generate([PROMPTS[i % 2] for i in range(len(names))], params)
    found = [output.outputs[0] for output in outputs]
    return [(one.token_ids, one.logprobs.raw, one.logprobs.processed) for one in found]


def alike(engines: list[Rollout], names: list[str | None]) -> list[Any]:
    """What both say, which is the same."""
    first, second = (said(rollout, names) for rollout in engines)
    assert first == second
    return first


def digests(receipts: list[Any]) -> dict[str, int]:
    """Of the adapters of an update of both, which are the same."""
    first, second = ({k: v.digest for k, v in each.adapters.items()} for each in receipts)
    assert first == second
    return first


def test_one_batch_of_all_kinds_and_its_updates_give_the_bits_of_one_stage(
    engines, base, tmp_path
) -> None:
    models = {name: adapted(base, seed, **of) for seed, (name, of) in enumerate(KINDS.items())}
    names = [None, *models, *models]
    plain = alike(engines, [None])
    sent = digests([r.update_weights(adapters=dict(models)) for r in engines])
    assert sent.keys() == models.keys()
    first = alike(engines, names)
    assert len({str(tokens) for tokens, *_ in first[: len(models) + 1]}) == len(models) + 1
    # From files, and another version of one.
    models["late"].save_pretrained(tmp_path / "late")
    for rollout in engines:
        rollout.load_lora_adapter("files", tmp_path / "late")
    by_file = alike(engines, ["late", "files"])
    assert len({rollout.receipts()[-1].adapters["files"].digest for rollout in engines}) == 1
    digests([r.update_weights(adapters={"late": adapted(base, 9, r=4)}) for r in engines])
    assert alike(engines, ["late", "files"])[0] != by_file[0]
    for rollout in engines:
        rollout.rollback()
    assert alike(engines, ["late", "files"]) == by_file
    # The base with one, and back; norms are those of the base below.
    other = adapted(base, 1, **KINDS["normed"])
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "base_layer.weight" in name:
                parameter *= torch.linspace(1.0, 1.5, parameter.shape[1])
    receipts = [r.update_weights(other, adapters={"normed": other}) for r in engines]
    assert receipts[0].digest == receipts[1].digest
    moved = alike(engines, names)
    assert moved[0] != first[0]
    for rollout in engines:
        rollout.rollback()
    assert alike(engines, names) == first
    for rollout in engines:
        for name in (*models, "files"):
            assert rollout.unload_lora_adapter(name)
        with pytest.raises(InvalidRequest, match="no adapter 'late'"):
            said(rollout, ["late"])
    assert alike(engines, [None]) == plain


def test_adapters_of_the_vocabulary_lie_on_the_first_stage(engines, base) -> None:
    models = {name: adapted(base, seed, **of) for seed, (name, of) in enumerate(WORDS.items())}
    digests([r.update_weights(adapters=dict(models)) for r in engines])
    found = alike(engines, [None, *models, *models])
    assert len({str(tokens) for tokens, *_ in found[:4]}) == 4
    for rollout in engines:
        for name in models:
            assert rollout.unload_lora_adapter(name)


def test_the_first_rank_tells_of_all_modules_and_each_is_read_back_whole(engines, base) -> None:
    whole, cut = (rollout._async.backend.coordinator for rollout in engines)
    assert whole.served.adaptable == cut.served.adaptable
    assert {f"model.layers.{i}.mlp.down_proj" for i in range(3)} < cut.served.adaptable
    model = adapted(base, 4, use_dora=True)
    for rollout in engines:
        rollout.update_weights(adapters={"math": model})
    found = [live_adapters(each, ["math"], 30)["math"].tensors for each in (whole, cut)]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    for rollout in engines:
        rollout.unload_lora_adapter("math")


def test_what_is_wrong_on_any_stage_is_refused_and_changes_nothing(
    engines, base, monkeypatch
) -> None:
    cut = engines[1]
    cut.update_weights(adapters={"math": adapted(base, 5)})
    before, version = said(cut, ["math"]), cut.weight_version
    for layer in (0, 2):
        broken = adapted(base, 6)
        with torch.no_grad():
            name = f"layers.{layer}.self_attn.q_proj.lora_B"
            next(p for n, p in broken.named_parameters() if name in n)[0, 0] = torch.nan
        with pytest.raises(WeightMismatch, match=rf"adapter/math:.*layers\.{layer}\..*lora_B"):
            cut.update_weights(adapters={"math": broken})
    write_tiny(base.parent / "wide", "qwen3", tied=True, num_layers=3, intermediate_size=96)
    with pytest.raises(WeightMismatch, match=r"layers\.2\.mlp\.down_proj\.lora_A"):
        cut.update_weights(adapters={"math": adapted(base.parent / "wide", 6)})
    with pytest.raises(ConfigError, match=r"rank 5.*max_lora_rank=5"):
        cut.update_weights(adapters={"math": adapted(base, 6, r=5)})
    assert cut.weight_version == version
    assert said(cut, ["math"]) == before
    cut.unload_lora_adapter("math")


def test_each_rank_holds_what_lies_beside_its_own_modules_and_knows_the_rest(tmp_path) -> None:
    write_tiny(tmp_path, "qwen3_moe", num_layers=3)
    config = ModelConfig.from_directory(tmp_path)
    every = {"vocabulary": True, "experts": True}
    whole = slots_beside(build_model(config, TensorParallel(), *WHERE), 2, 4, **every)
    spec = AdapterSpec(
        modules={
            module: ModuleSpec(rank=2 + index % 3, scaling=1 + index / 7, kind=_kind(module, index))
            for index, module in enumerate(sorted(whole.modules))
        }
    )
    wanted = {n: s[0].shape for n, s in whole.view(0, spec).table.slots.items()}
    for size, stages in ((1, 2), (1, 3), (2, 2)):
        places = [place_of(rank, size, stages) for rank in range(size * stages)]
        held = [
            slots_beside(build_model(config, tp, *WHERE, stage=stage), 2, 4, **every)
            for tp, stage in places
        ]
        assert all(slots.modules == whole.modules for slots in held)
        views = [slots.view(0, spec) for slots in held]
        check_tables([view.table for view in views])
        assert {n: s[0].shape for n, s in views[-1].table.slots.items()} == wanted
        assert all(slots.nbytes < whole.nbytes / 1.5 for slots in held)
        if size == 1:
            assert sum(slots.nbytes for slots in held) == whole.nbytes
        for view in views:
            view.load_weights({n: torch.ones(shape) for n, shape in wanted.items()}.items())
            assert view.scaling_digest() == spec.scaling_digest
            view._adapted["away.linear"].scales[0] *= 1.01
            assert view.scaling_digest() != spec.scaling_digest
        for slots in held:  # of an adapter of one module, which leaves what was there before it
            few = slots.view(0, FEW)
            tensors = FEW.modules[LAST].tensors(LAST, (64, 64)).items()
            few.load_weights((name, torch.ones(shape)) for name, shape in tensors)
            assert few.scaling_digest() == FEW.scaling_digest
            with pytest.raises(ConfigError, match=rf"{LAST} as embedding.*kind linear"):
                slots.view(0, AdapterSpec(modules={LAST: replace(SMALL, kind=EMBEDDING)}))


def _kind(module: str, index: int) -> str:
    if "embed" in module:
        return EMBEDDING
    return EXPERTS if ".experts." in module else (LINEAR, DORA, BIASED)[index % 3]


@pytest.mark.parametrize("transport", ["ipc", "grpc_stream", "broadcast"])
def test_an_adapter_of_one_stage_alone_goes_by_every_transport(engines, base, transport) -> None:
    """The other stage's ranks take nothing of it."""
    with Rollout.connect(engines[1].address) as remote:
        for kind in ("early", "late"):
            for seed in (11, 12):
                model = adapted(base, seed, **KINDS[kind])
                here = engines[0].update_weights(adapters={"math": model})
                there = remote.update_weights(adapters={"math": model}, transport=transport)
                digests([here, there])
                alike(engines, ["math", None])
    for rollout in engines:
        rollout.unload_lora_adapter("math")


@pytest.mark.more
def test_ranks_of_a_trainer_send_it_to_the_stages_that_hold_it(engines, base, tmp_path) -> None:
    engines[0].update_weights(adapters={"math": adapted(base, 21)})
    script = Path(__file__).parent / "adapter_job.py"
    ways = ("auto", "ipc", "grpc_stream", "broadcast", "p2p")
    job = Job(script, 2, tmp_path / "log", engines[1].address, str(base), *ways)
    try:
        assert None not in job.answers(120), job.log.read_text()
    finally:
        job.close()
    alike(engines, ["math", None])
    for rollout in engines:
        rollout.unload_lora_adapter("math")


@pytest.mark.parametrize(
    ("arch", "ranks", "more"),
    [
        ("qwen3_moe", {}, {}),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (
                ("qwen3_moe", {"tp": 2}, {}),
                ("qwen3_moe", {"tp": 2, "pipeline_parallel_size": 3}, {"expert_parallel": True}),
                ("qwen3_moe", {}, {"max_cpu_loras": 0, "max_adapters": 6}),
                ("deepseek_v3", {}, {}),
                ("qwen3_moe", {}, {"deterministic": True}),
                ("qwen3_moe", {}, {"quantization": "int8"}),
                ("qwen3_moe", {}, {"staging": "host"}),
                ("qwen3_moe", {}, {"staging": "none", "undo": "host"}),
                ("qwen3_moe", {}, {"dtype": "bfloat16"}),
            )
        ),
    ],
    ids=str,
)
def test_adapters_of_experts_and_those_in_host_memory_do_so_too(
    tmp_path, arch, ranks, more
) -> None:
    base = tmp_path / "base"
    write_tiny(base, arch, num_layers=3)
    kinds = OF_MIXTURES if arch == "qwen3_moe" else {"experts": OF_MIXTURES["experts"]}
    models = {name: adapted(base, seed, **of) for seed, (name, of) in enumerate(kinds.items())}
    with both(base, {**SETTINGS, **EVERYTHING, **more}, ranks) as engines:
        plain = alike(engines, [None])
        for name, model in models.items():
            digests([r.update_weights(adapters={name: model}) for r in engines])
        names = [None, *models]
        first = alike(engines, [*names, *names])
        assert len({str(tokens) for tokens, *_ in first[: len(names)]}) == len(names)
        model = models["experts"]
        receipts = [
            r.update_weights(shaken(model, 9), adapters={"experts": model}) for r in engines
        ]
        assert receipts[0].digest == receipts[1].digest
        assert alike(engines, ["experts"])[0] != first[1]
        for rollout in engines:
            rollout.rollback()
        assert alike(engines, [*names, *names]) == first
        for rollout in engines:
            for name in models:
                rollout.unload_lora_adapter(name)
        assert alike(engines, [None]) == plain
