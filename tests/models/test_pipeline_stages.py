"""Stages of a pipeline: the logits of one stage, bit for bit, and tables whole together."""

import random
from itertools import combinations, pairwise

import pytest
import torch
from rank_threads import Session, loaded, prompts, run_ranks, run_stages
from tiny_models import DENSE, write_tiny

from rollout.distributed.stage import Stage
from rollout.errors import ConfigError
from rollout.models.build import build_tables
from rollout.models.config.model import ModelConfig
from rollout.models.config.stage_layers import _cut, stage_layers
from rollout.models.weight_io.table import check_tables

# Embeddings and heads with factors, norms elsewhere, fused files, windows, chunks, sinks, latents,
# experts and dense layers before them, states alone, beside attention and under other names.
KINDS = (
    *("llama", "gemma2", "cohere", "granite", "phi3", "gpt_oss", "llama4", "deepseek_v3"),
    *("qwen2_moe", "qwen3_next", "falcon_h1", "nemotron_h", "kimi_linear"),
)
OTHERS = (
    *DENSE,
    *("qwen2", "mistral", "qwen3_moe", "mixtral", "glm4_moe", "olmoe", "deepseek_v2"),
    *("minimax_m2", "glm4_moe_lite", "qwen3_5_moe", "phimoe", "granite_hybrid"),
)


def steps(model, sequences):
    """The logits of all tokens, in chunks that cut sequences."""
    session, left = Session(model, sequences), [len(s) for s in sequences]
    parts = []
    while any(left):
        counts = [min(count, 7) for count in left]
        parts += session.advance(counts)
        left = [count - taken for count, taken in zip(left, counts, strict=True)]
    return parts


@pytest.mark.parametrize(
    "arch",
    [*KINDS, *(pytest.param(a, marks=pytest.mark.soak) for a in OTHERS if a not in KINDS)],
)
def test_every_architecture_gives_the_bits_of_one_stage(tmp_path, arch):
    weights = write_tiny(tmp_path, arch).state_dict()
    config = ModelConfig.from_directory(tmp_path)
    sequences = prompts(config.vocab_size)
    check_tables(build_tables(config, 2, stages=2))

    def work(tp, stage=None):
        model = loaded(config, tp, weights, stage=stage)
        return steps(model, sequences), sum(p.numel() for p in model.parameters())

    [(wanted, whole)] = run_ranks(1, work)
    (first, here), (second, there) = run_stages(2, 1, work)
    assert all(torch.equal(a, b) for a, b in zip(first, wanted, strict=True))
    assert not sum(logits.numel() for logits in second)
    assert here + there == whole
    assert 0 < there < whole


@pytest.mark.parametrize("layout", ["plain", "tiles"])
def test_more_stages_of_several_ranks_give_the_bits_of_one_such_stage(tmp_path, layout):
    weights = write_tiny(tmp_path, "qwen3", tied=True, num_layers=5, dtype=torch.bfloat16)
    weights = weights.state_dict()
    config = ModelConfig.from_directory(tmp_path)
    sequences, blocks = prompts(config.vocab_size), []

    def work(tp, stage=None):
        model = loaded(config, tp, weights, torch.bfloat16, layout, stage=stage)
        found = steps(model, sequences)
        blocks.append(model.native_blocks is not None)
        return found

    wanted = run_ranks(2, work)[0]
    for count in (2, 3, 5):
        first, *others = run_stages(count, 2, work)
        assert all(torch.equal(a, b) for a, b in zip(first, wanted, strict=True))
        assert len(others) == 2 * count - 1
    assert set(blocks) == {layout == "tiles"}


def test_layers_are_dealt_out_so_that_the_largest_stage_is_as_small_as_can_be():
    """Against every way to cut them; the first stage has the embedding and the head, too."""
    draw = random.Random(1)
    for turn in range(200):
        costs = tuple(draw.choice((1, 1, 1, 9)) for _ in range(draw.randint(1, 9)))
        ends, count = draw.choice((0, 2, 30)), draw.randint(1, len(costs))
        stops = _cut(costs, ends, count)

        def largest(stops, costs=costs, ends=ends):
            sizes = [sum(costs[a:b]) for a, b in pairwise(stops)]
            return max(sizes[0] + ends, *sizes)

        ways = ((0, *way, len(costs)) for way in combinations(range(1, len(costs)), count - 1))
        assert largest(stops) == min(map(largest, ways)), (turn, costs, ends, count)
        assert all(a < b for a, b in pairwise(stops))


def test_the_head_and_the_experts_count_as_what_they_weigh(tmp_path):
    def counts(arch, stages, **sizes):
        write_tiny(tmp_path, arch, **sizes)
        config = ModelConfig.from_directory(tmp_path)
        held = [stage_layers(config, Stage(index, stages)) for index in range(stages)]
        assert [layer for layers in held for layer in layers] == list(range(config.num_layers))
        return [len(layers) for layers in held]

    assert counts("llama", 2, num_layers=8, vocab_size=64) == [4, 4]
    assert counts("llama", 2, num_layers=8, vocab_size=2000) == [1, 7]
    assert counts("llama", 4, num_layers=8, vocab_size=64) == [2, 2, 2, 2]
    dense = {"mlp_only_layers": [0, 1, 2, 3], "moe_intermediate_size": 512}
    assert counts("qwen3_moe", 2, num_layers=6, vocab_size=64, **dense) == [5, 1]


def test_what_cannot_be_cut_is_refused_by_name(tmp_path):
    write_tiny(tmp_path, "llama")
    config = ModelConfig.from_directory(tmp_path)
    few = f"pipeline_parallel_size=9: LlamaForCausalLM has {config.num_layers} layers"
    with pytest.raises(ConfigError, match=few):
        build_tables(config, 1, stages=9)
    write_tiny(tmp_path, "deepseek_v32")
    config = ModelConfig.from_directory(tmp_path)
    with pytest.raises(ConfigError, match="has an index of tokens that layers share"):
        build_tables(config, 1, stages=2)
