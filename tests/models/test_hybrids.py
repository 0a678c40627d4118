"""Models with recurrent states in the engine: whatever their states go through, what transformers
computes without a cache is what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import Session, loaded, run_ranks
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.config import EngineConfig
from rollout.distributed import TensorParallel
from rollout.engine import loop
from rollout.engine.worker.state_cache import StateCache, StateShape
from rollout.errors import ConfigError
from rollout.models.build import build_model
from rollout.models.config.model import ModelConfig
from rollout.server.preflight import check

pytestmark = pytest.mark.usefixtures("forked_ranks")

SETTINGS = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "block_size": 8, "max_model_len": 128,
    "num_kv_blocks": 64, "max_num_seqs": 6, "max_num_batched_tokens": 24, "timeout": 20.0,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
FORKED = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=9, ignore_eos=True)
PROMPTS = [[(3 + 11 * i + 7 * j) % 320 for j in range(7 + 9 * i)] for i in range(4)]


def start(path: Path, **settings: Any) -> Rollout:
    return Rollout(str(path), **{**SETTINGS, **settings})


def compare(model: torch.nn.Module, prompt: list[int], sample: Any, greedy: bool = True) -> None:
    """With transformers' logprobs of one forward pass over prompt and answer."""
    whole = torch.tensor([[*prompt, *sample.token_ids]])
    with torch.no_grad():
        rows = model(whole, use_cache=False).logits[0].float().log_softmax(-1)
    rows, chosen = rows[len(prompt) - 1 : -1], torch.tensor(sample.token_ids)
    raw = torch.tensor(sample.logprobs.raw)
    assert (rows.gather(1, chosen[:, None])[:, 0] - raw).abs().max() < 1e-4
    top = rows.topk(2).values
    clear = top[:, 0] - top[:, 1] > 1e-3
    assert not greedy or torch.equal(rows.argmax(-1)[clear], chosen[clear])


@pytest.mark.parametrize(
    ("arch", "tp", "ahead"),
    [
        ("qwen3_next", 1, False),
        ("qwen3_next", 1, True),
        ("qwen3_5", 2, False),
        ("granite_hybrid", 1, True),
        ("falcon_h1", 1, False),
        ("kimi_linear", 1, False),
        pytest.param("olmo_hybrid", 2, False, marks=pytest.mark.more),
        pytest.param("nemotron_h", 2, False, marks=pytest.mark.more),
        pytest.param("falcon_h1", 2, True, marks=pytest.mark.more),
        pytest.param("qwen3_5", 2, True, marks=pytest.mark.more),
    ],
)
def test_chunks_preemption_prefixes_and_forks_give_what_transformers_computes(
    tmp_path: Path, arch: str, tp: int, ahead: bool
) -> None:
    model = write_tiny(tmp_path, arch)
    with start(
        tmp_path, tensor_parallel_size=tp, num_kv_blocks=16, state_snapshot_blocks=2,
        async_scheduling=ahead,
    ) as rollout:  # fmt: skip
        for _turn in range(2):
            for prompt, output in zip(PROMPTS, rollout.generate(PROMPTS, GREEDY), strict=True):
                compare(model, prompt, output.outputs[0])
        before = rollout.metrics()
        assert before.preemptions_total > 0
        assert before.state_snapshot_hits_total > 0
        outputs = rollout.generate(PROMPTS, FORKED)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            for sample in output.outputs:
                compare(model, prompt, sample, greedy=False)
        assert len({tuple(s.token_ids) for s in outputs[0].outputs}) > 1
        assert rollout.metrics().state_snapshot_saves_total > before.state_snapshot_saves_total


@pytest.mark.parametrize(
    ("changes", "tp"),
    [
        ({"mamba_norm_before_gate": False}, 4),
        ({"mamba_rms_norm": False, "projectors_bias": True, "mamba_proj_bias": True}, 2),
        ({"mlp_multipliers": None, "ssm_multipliers": None, "attention_bias": True}, 1),
    ],
)
def test_falcon_h1_in_every_form_is_what_transformers_computes(
    tmp_path: Path, changes: dict[str, Any], tp: int
) -> None:
    source = write_tiny(tmp_path, "falcon_h1", num_key_value_heads=4, **changes)
    config = ModelConfig.from_directory(tmp_path)
    assert config.paged_layers == config.recurrent_layers == (0, 1, 2)
    with torch.no_grad():
        wanted = [source(torch.tensor([p])).logits[0].log_softmax(-1) for p in PROMPTS[:2]]

    def work(rank: TensorParallel) -> list[torch.Tensor]:
        session = Session(loaded(config, rank, source.state_dict()), PROMPTS[:2])
        steps = [session.advance(counts) for counts in ([4, 9], [2, 6], [1, 1])]
        return [torch.cat(parts).log_softmax(-1) for parts in zip(*steps, strict=True)]

    for ours in run_ranks(tp, work):
        for one, other in zip(ours, wanted, strict=True):
            assert (one - other).abs().max() < 1e-4
    values = source.config.to_dict()
    with pytest.raises(ConfigError, match="ssm_multipliers must be 5 numbers"):
        ModelConfig.from_hf({**values, "ssm_multipliers": [1.0]})


@pytest.mark.parametrize(
    "arch",
    [
        "qwen3_5",
        pytest.param("kimi_linear", marks=pytest.mark.more),
        pytest.param("nemotron_h", marks=pytest.mark.more),
        pytest.param("falcon_h1", marks=pytest.mark.more),
    ],
)
def test_a_warm_run_equals_a_cold_one_bit_for_bit_and_only_of_the_same_weights(
    tmp_path: Path, arch: str
) -> None:
    model = write_tiny(tmp_path, arch)
    with start(tmp_path, max_num_seqs=24, state_snapshot_blocks=1) as rollout:

        def run() -> tuple[list[Any], list[int]]:
            outputs = [rollout.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
            samples = [output.outputs[0] for output in outputs]
            rows = [(s.token_ids, s.logprobs.raw, s.logprobs.processed) for s in samples]
            return rows, [output.num_cached_tokens for output in outputs]

        cold, cached = run()
        assert cached == [0, 0, 0, 0]  # of prompts that share no block
        warm, cached = run()
        assert cached == [(len(prompt) - 1) // 8 * 8 for prompt in PROMPTS]
        assert warm == cold
        rollout.sleep(1)
        rollout.wake_up()
        assert run() == (cold, [0, 0, 0, 0])
        rollout.update_weights(model)
        again, cached = run()
        assert (again, cached) == (cold, [0, 0, 0, 0])
        assert run() == (warm, [(len(prompt) - 1) // 8 * 8 for prompt in PROMPTS])


def test_a_model_of_states_alone_needs_no_pages(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, "granite_hybrid", layer_types=["mamba"] * 3)
    assert not ModelConfig.from_directory(tmp_path).paged_layers
    with start(tmp_path) as rollout:
        for prompt, output in zip(PROMPTS, rollout.generate(PROMPTS, GREEDY), strict=True):
            compare(model, prompt, output.outputs[0])


def test_few_slots_give_the_same_answers_in_more_steps(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, "qwen3_5")
    found = check(EngineConfig(model=str(tmp_path), **SETTINGS))
    each = found.memory.states // 12
    assert (found.size.running, found.size.snapshots) == (6, 6)
    assert f"{found.size.running} of sequences, 6 snapshots" in str(found.memory)
    with start(tmp_path, state_cache_bytes=3 * each) as rollout:
        for prompt, output in zip(PROMPTS, rollout.generate(PROMPTS, FORKED), strict=True):
            for sample in output.outputs:
                compare(model, prompt, sample, greedy=False)
        assert rollout.metrics().state_snapshot_evictions_total > 0
    with pytest.raises(ConfigError, match=f"state_cache_bytes={each} must be from {2 * each}"):
        start(tmp_path, state_cache_bytes=each)


def test_steps_put_off_for_grammars_go_on_from_the_right_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_MASK_GRACE", 0.0)  # every mask comes too late for its first step
    model = write_tiny(tmp_path, "qwen3_next", tokenizer=True)
    params = SamplingParams(
        temperature=1.0, seed=3, n=3, max_tokens=6, structured_outputs={"regex": "[a-z]{5}"}
    )
    with start(tmp_path, max_num_batched_tokens=64, state_snapshot_blocks=1) as rollout:
        for turn in range(3):
            for output in rollout.generate(PROMPTS[2], params):
                assert turn == 0 or output.num_cached_tokens == 24
                for sample in output.outputs:
                    compare(model, PROMPTS[2], sample, greedy=False)
        assert rollout.metrics().state_snapshot_hits_total >= 2


def test_what_recurrent_states_cannot_do_yet_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3_next")
    with pytest.raises(ConfigError, match="layers with a recurrent state"):
        start(tmp_path, deterministic=True)
    write_tiny(tmp_path / "odd", "qwen3_next", linear_num_key_heads=1)
    with pytest.raises(ConfigError, match=r"linear attention key heads \(1\)"):
        start(tmp_path / "odd", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mamba_n_groups": 3}, "mamba_n_heads 8 must be a multiple of mamba_n_groups 3"),
        ({"hidden_act": "gelu"}, "hidden_act of Mamba layers must be silu, got 'gelu'"),
        ({"layer_types": ["mamba", "attention", "hybrid"]}, "layer_types has 'hybrid'"),
        ({"time_step_limit": [0.1, None]}, "time_step_limit must be two numbers"),
    ],
)
def test_what_mamba_layers_cannot_be_is_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    values = write_tiny(tmp_path, "granite_hybrid").config.to_dict()
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_hf({**values, **changed})


def test_heads_and_groups_of_mamba_layers_go_to_ranks_whole(tmp_path: Path) -> None:
    values = write_tiny(tmp_path, "granite_hybrid").config.to_dict()
    config = ModelConfig.from_hf({**values, "mamba_n_heads": 6, "mamba_n_groups": 3})
    config.check_tensor_parallel(1)
    with pytest.raises(ConfigError, match=r"Mamba groups \(3\) must be divisible by tensor"):
        config.check_tensor_parallel(2)
    with pytest.raises(ConfigError, match=r"Mamba heads \(6\) must be divisible by tensor"):
        config.check_tensor_parallel(4)


def test_kinds_of_layers_are_read_in_every_form_that_files_have(tmp_path: Path) -> None:
    values = write_tiny(tmp_path, "nemotron_h").config.to_dict()
    kinds = ModelConfig.from_hf(values).layers
    del values["layers_block_type"]
    older = ModelConfig.from_hf({**values, "hybrid_override_pattern": "ME*-E"})
    assert older.layers == kinds
    assert older.recurrent_layers == (0,)
    assert older.feeding_layers == (1, 3, 4)
    values = write_tiny(tmp_path / "granite", "granite_hybrid").config.to_dict()
    kinds = ModelConfig.from_hf(values).layers
    older = ModelConfig.from_hf({**values, "layer_types": ["mamba", "mamba", "attention"]})
    assert older.layers == kinds


def test_how_fast_states_decay_keeps_its_bits_in_a_bfloat16_engine(tmp_path: Path) -> None:
    """Trainers may hold it in float32 beside bfloat16 weights: it travels and lies as it is."""
    model = write_tiny(tmp_path, "qwen3_next", dtype=torch.bfloat16)
    settings = {**SETTINGS, "dtype": "bfloat16"}
    with Rollout(str(tmp_path), **settings) as rollout:
        before = rollout.generate(PROMPTS, GREEDY)
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.data = parameter.float() + 1e-3  # between two bfloat16
        receipt = rollout.update_weights(model)
        assert rollout.check_weights(model).equal
        after = rollout.generate(PROMPTS, GREEDY)
        assert receipt.version == 1
        assert [o.outputs[0].logprobs.raw for o in before] != [
            o.outputs[0].logprobs.raw for o in after
        ]
        model.save_pretrained(tmp_path / "again")
    with Rollout(str(tmp_path / "again"), **settings) as fresh:
        cold = fresh.generate(PROMPTS, GREEDY)
        for ours, theirs in zip(after, cold, strict=True):
            assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
            assert ours.outputs[0].logprobs.raw == theirs.outputs[0].logprobs.raw


@pytest.mark.parametrize("arch", ["qwen3_next", "granite_hybrid"])
def test_states_of_a_bfloat16_engine_are_kept_in_float32(tmp_path: Path, arch: str) -> None:
    """As rounded ones would differ by how often they were stored; a warm run is a cold one."""
    write_tiny(tmp_path, arch, dtype=torch.bfloat16)
    shape = StateShape.of(ModelConfig.from_directory(tmp_path), 1, torch.bfloat16)
    states = StateCache(shape, torch.device("cpu"))
    states.allocate(3)
    held = [(kv.k.dtype, kv.v.dtype) for kv in states.layers.values()]
    assert held == [(torch.bfloat16, torch.float32)] * len(shape.layers)
    assert sum(kv.k.nbytes + kv.v.nbytes for kv in states.layers.values()) == 3 * shape.slot_bytes
    settings = {**SETTINGS, "dtype": "bfloat16", "state_snapshot_blocks": 1, "max_num_seqs": 24}
    found = []
    with Rollout(str(tmp_path), **settings) as rollout:
        for hits in (False, True):  # cold, and from states that were kept
            outputs = [rollout.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
            assert any(output.num_cached_tokens for output in outputs) == hits
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs.raw) for o in outputs])
    assert found[0] == found[1]


def test_a_text_model_takes_the_names_of_the_whole_one_and_passes_over_its_other_heads(
    tmp_path: Path,
) -> None:
    weights = write_tiny(tmp_path, "qwen3_5").state_dict()
    config = ModelConfig.from_directory(tmp_path)
    wanted = build_model(config, TensorParallel(), torch.float32, "cpu")
    wanted.load_weights(weights.items())
    renamed = {name.replace("model.", "model.language_model.", 1): w for name, w in weights.items()}
    others = {
        "mtp.fc.weight": torch.zeros(2, 2),
        "model.visual.patch_embed.proj.bias": torch.ones(3),
    }
    model = build_model(config, TensorParallel(), torch.float32, "cpu")
    model.load_weights({**renamed, **others}.items())
    for name, storage in model.storages().items():
        assert torch.equal(storage, wanted.storages()[name]), name
