"""Mixtures of experts against transformers: logits at every placement of their weights."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from rank_threads import Session, loaded, prompts, reference, run_ranks
from tiny_models import write_tiny

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError, WeightMismatch
from rollout.models.build import build_tables
from rollout.models.config.model import ModelConfig
from rollout.models.weight_io.table import check_tables
from rollout.weights import SparsePatch

# (ranks, expert parallel)
PLACES = ((1, False), (2, False), (4, False), (2, True), (4, True))
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.8,
    "mscale_all_dim": 1.2,
    "original_max_position_embeddings": 16,
}
SHAPES = {
    "glm4_moe_lite": {},
    "granite_hybrid": {},
    "granite_hybrid, one group, rope, no bias of the convolution": {
        "mamba_n_groups": 1,
        "position_embedding_type": "rope",
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "time_step_limit": (0.4, 0.9),
    },
    "kimi_linear": {},
    "kimi_linear, queries by a vector, all sparse, one group": {
        "q_lora_rank": 28,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": False,
        "mlp_layer_types": ["sparse", "sparse", "sparse"],
        "linear_num_heads": 8,
        "num_shared_experts": 2,
    },
    "nemotron_h": {},
    "nemotron_h, narrow experts, biases": {
        "moe_latent_size": 20,
        "use_bias": True,
        "n_groups": 4,
        "time_step_min": 0.6,
    },
    "gpt_oss": {},
    "llama4": {},
    "llama4, all sparse, all listed, even temperature": {
        "moe_layers": [0, 1],
        "num_hidden_layers": 2,
        "no_rope_layers": [1, 0],
        "attn_temperature_tuning": False,
        "use_qk_norm": False,
        "attention_bias": True,
    },
    "minimax_m2": {},
    "qwen3_5_moe": {"linear_num_key_heads": 8, "linear_conv_kernel_dim": 2},
    "phimoe": {},
    "phimoe, longrope with factors of its own, a window, no biases": {
        "attention_bias": False,
        "lm_head_bias": False,
        "sliding_window": 9,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0 + i / 4 for i in range(8)],
            "short_mscale": 1.2,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 512,
        },
    },
    "qwen3_next": {},
    "olmoe": {},
    "deepseek_v3": {},
    "deepseek_v3, queries of the hidden state, one dense layer, yarn": {
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "rope_interleave": False,
        "rope_parameters": YARN,
        "num_layers": 3,
    },
    "deepseek_v32": {},
    "deepseek_v32, three tokens of an odd head, yarn": {
        "index_topk": 3,
        "index_n_heads": 17,
        "index_head_dim": 7,
        "attention_bias": True,
        "rope_parameters": YARN,
    },
    "glm_moe_dsa": {},
    "glm_moe_dsa, layers that share an index": {
        "num_layers": 4,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "deepseek_v2": {},
    "deepseek_v2, greedy, yarn": {
        "topk_method": "greedy",
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "rope_parameters": YARN,
    },
    "glm4_moe": {},
    "glm4_moe, normalised heads, one dense layer, no groups": {
        "use_qk_norm": True,
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "num_layers": 3,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "head_dim": 20,
        "partial_rotary_factor": 0.3,
    },
    "qwen3_moe": {},
    "qwen3_moe, dense first layer, raw probabilities": {
        "mlp_only_layers": [0],
        "norm_topk_prob": False,
        "num_layers": 3,
        "attention_bias": True,
    },
    "qwen2_moe": {},
    "qwen2_moe, every second layer, tied": {
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
        "tied": True,
        "num_experts": 5,
    },
    "mixtral": {},
    "mixtral, three of eight, four key heads": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
    },
}


# Second shapes of an architecture, and architectures that are others' but for a field.
MORE = (
    "kimi_linear, queries by a vector, all sparse, one group",
    "glm4_moe, normalised heads, one dense layer, no groups",
    "deepseek_v3, queries of the hidden state, one dense layer, yarn",
    "deepseek_v32, three tokens of an odd head, yarn",
    "glm_moe_dsa",
    "deepseek_v2",
    "granite_hybrid",
    "granite_hybrid, one group, rope, no bias of the convolution",
    "nemotron_h",
    "qwen3_5_moe",
    "glm4_moe_lite",
    "phimoe, longrope with factors of its own, a window, no biases",
    "llama4, all sparse, all listed, even temperature",
)


@pytest.mark.parametrize(
    "shape",
    [pytest.param(s, marks=pytest.mark.more) if s in MORE else s for s in SHAPES],
)
def test_logits_equal_those_of_transformers_at_every_placement(tmp_path, shape):
    source = write_tiny(tmp_path, shape.split(",")[0], **SHAPES[shape])
    config = ModelConfig.from_directory(tmp_path)
    assert config.moe is not None
    sequences = prompts(config.vocab_size)
    wanted = reference(source, sequences)
    weights = source.state_dict()

    for size, expert_parallel in PLACES:
        check_tables(build_tables(config, size, expert_parallel=expert_parallel))

        def work(tp, split=expert_parallel):
            whole = Session(loaded(config, tp, weights, expert_parallel=split), sequences)
            before = tp.all_reduces
            logits = whole.advance([len(s) for s in sequences])
            if tp.size > 1:
                sums = 3 if config.arch.qk_norm_over == "row" else 1 if config.arch.lone else 2
                mamba = config.mamba  # whose norms go over the ranks that share a group
                shared = 0 if mamba is None or tp.size <= mamba.groups else 1
                sums = sums * config.num_layers + shared * len(config.recurrent_layers)
                assert tp.all_reduces - before == sums + 1
            tiled = loaded(config, tp, weights, layout="tiles", expert_parallel=split)
            pieces = Session(tiled, sequences)
            steps = [pieces.advance(counts) for counts in ((7, 5, 0), (12, 0, 32), (0, 1, 1))]
            return logits, [torch.cat(parts) for parts in zip(*steps, strict=True)]

        for got in chain(*run_ranks(size, work)):
            for ours, theirs in zip(got, wanted, strict=True):
                assert (ours - theirs).abs().max() < 1e-4
                mine, other = ours.log_softmax(-1), theirs.log_softmax(-1)
                assert (mine - other).abs().max() < 1e-4
                top = theirs.topk(2).values
                clear = top[:, 0] - top[:, 1] > 1e-3
                assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])
                assert clear.float().mean() > 0.9


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_bfloat16_stays_as_close_to_float32_as_transformers(tmp_path, arch):
    source = write_tiny(tmp_path, arch, dtype=torch.bfloat16)
    config = ModelConfig.from_directory(tmp_path)
    sequences = prompts(config.vocab_size)
    weights = {k: v.clone() for k, v in source.state_dict().items()}
    theirs = [logits.log_softmax(-1) for logits in reference(source, sequences)]
    exact = [logits.log_softmax(-1) for logits in reference(source.float(), sequences)]

    def work(tp):
        model = loaded(config, tp, weights, dtype=torch.bfloat16)
        return Session(model, sequences).advance([len(s) for s in sequences])

    ours = [logits.float().log_softmax(-1) for logits in run_ranks(1, work)[0]]
    # A router's near tie may fall the other way: compare what is typical, not the worst.
    mine = torch.cat([(a - b).abs().flatten() for a, b in zip(ours, exact, strict=True)])
    other = torch.cat([(a - b).abs().flatten() for a, b in zip(theirs, exact, strict=True)])
    assert mine.median() < 1.5 * other.median() + 1e-3


@pytest.mark.parametrize(
    ("arch", "field"),
    [
        ("qwen3_moe", "num_experts_per_tok"),
        ("qwen3_moe", "norm_topk_prob"),
        ("qwen3_moe", "moe_intermediate_size"),
        ("qwen3_moe", "decoder_sparse_step"),
        ("qwen2_moe", "shared_expert_intermediate_size"),
        ("mixtral", "num_local_experts"),
        ("mixtral", "num_experts_per_tok"),
    ],
)
def test_a_missing_field_is_named(tmp_path, arch, field):
    values = write_tiny(tmp_path, arch).config.to_dict()
    assert ModelConfig.from_hf(values).moe is not None
    del values[field]
    with pytest.raises(ConfigError, match=f"'{field}' is missing"):
        ModelConfig.from_hf(values)


@pytest.mark.parametrize(
    ("arch", "change", "said"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 7}, "more than the 6 experts"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers must be a list"),
        ("qwen2_moe", {"num_experts": 0}, "num_experts must be a positive integer"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer, 0"),
        ("glm4_moe", {"n_group": 4}, "2 of 6 experts cannot be chosen within topk_group 2 of"),
    ],
)
def test_a_field_that_cannot_be_is_refused(tmp_path, arch, change, said):
    values = write_tiny(tmp_path, arch).config.to_dict() | change
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_hf(values)


def test_experts_behind_a_sliding_window(tmp_path):
    source = write_tiny(tmp_path, "mixtral", sliding_window=7)
    config, sequence = ModelConfig.from_directory(tmp_path), list(range(5, 45))
    wanted = source(torch.tensor([sequence])).logits[0]
    (got,) = Session(loaded(config, TensorParallel(), source.state_dict()), [sequence]).advance(
        [40]
    )
    assert (got - wanted).abs().max() < 1e-4


def test_ranks_that_do_not_divide_the_experts_are_refused(tmp_path):
    config = ModelConfig.from_hf(
        write_tiny(tmp_path, "qwen3_moe", moe_intermediate_size=25).config.to_dict()
    )
    with pytest.raises(ConfigError, match=r"Expert intermediate size \(25\).*set expert_parallel"):
        config.check_tensor_parallel(2)
    config.check_tensor_parallel(2, expert_parallel=True)
    few = ModelConfig.from_hf(write_tiny(tmp_path, "mixtral", num_local_experts=3).config.to_dict())
    with pytest.raises(ConfigError, match="3 experts cannot be dealt out to 4 ranks"):
        few.check_tensor_parallel(4, expert_parallel=True)
    dense = ModelConfig.from_hf(write_tiny(tmp_path, "qwen3").config.to_dict())
    with pytest.raises(ConfigError, match="has no experts"):
        dense.check_tensor_parallel(2, expert_parallel=True)


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path):
    """A checkpoint has them behind the last layer; nothing here takes them."""
    source = write_tiny(tmp_path, "glm4_moe", num_nextn_predict_layers=1)
    config = ModelConfig.from_directory(tmp_path)
    weights = source.state_dict()
    further = {n.replace("layers.1.", "layers.2."): t for n, t in weights.items() if "s.1." in n}
    report = loaded(config, TensorParallel(), weights | further).load_weights(
        (weights | further).items()
    )
    assert not any(".layers.2." in name for name in report.loaded)
    with pytest.raises(WeightMismatch, match=r"unknown tensor 'model\.layers\.3\.x"):
        loaded(config, TensorParallel(), weights | {"model.layers.3.x": torch.zeros(1)})


def test_blocks_of_the_cache_that_lie_in_two_chunks_are_refused(tmp_path):
    config = ModelConfig.from_hf(write_tiny(tmp_path, "llama4").config.to_dict())
    assert [layer.chunk for layer in config.layers] == [16, 16, 16, 0]
    config.check_blocks(8)
    with pytest.raises(ConfigError, match="block_size 12 must divide attention_chunk_size 16"):
        config.check_blocks(12)


@pytest.mark.parametrize("arch", ["gpt_oss", "llama4"])
def test_changes_of_stacked_experts_make_what_the_changed_tensors_make(tmp_path, arch):
    source = write_tiny(tmp_path, arch)
    config = ModelConfig.from_directory(tmp_path)
    generator = torch.Generator().manual_seed(2)
    weights, changed, patches = source.state_dict(), {}, []
    for name, tensor in weights.items():
        flat = tensor.clone().flatten()
        positions = torch.randperm(flat.numel(), generator=generator)[: flat.numel() // 9 + 1]
        positions = positions.sort().values
        flat[positions] = torch.randn(len(positions), generator=generator)
        changed[name], shape = flat.view(tensor.shape), tuple(tensor.shape)
        patches.append((name, SparsePatch(shape, flat.dtype, positions, flat[positions])))
    for rank, split in ((0, False), (1, False), (1, True)):
        tp = TensorParallel(rank, 2)
        patched, fresh = (
            loaded(config, tp, held, expert_parallel=split) for held in (weights, changed)
        )
        patched.load_weights(patches)
        for one, other in zip(patched.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(one, other)
