"""Logits against transformers, over tensor-parallel sizes, layouts, shapes and chunkings."""

from dataclasses import replace

import pytest
import torch
from rank_threads import Session, loaded, prompts, reference, run_ranks
from tiny_models import write_tiny

from rollout.distributed import TensorParallel
from rollout.models.config.model import ModelConfig

SHAPES = {
    "heads of 12, vocabulary with padding": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "vocab_size": 317,
    },
    "three queries per key, llama3 rope, tied": {
        "hidden_size": 60,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 10,
        "intermediate_size": 84,
        "vocab_size": 321,
        "tied": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "seven queries per key, yarn rope": {
        "hidden_size": 56,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "one key head for all, linear rope, tied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "tied": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "two key heads replicated over four ranks": {"num_attention_heads": 8, "num_layers": 3},
}
CASES = [(arch, shape) for arch in ("llama", "qwen2", "qwen3") for shape in SHAPES]
CASES.append(("mistral", "two key heads replicated over four ranks"))
BIASES = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen2": {}, "qwen3": {}}


@pytest.mark.parametrize(("arch", "shape"), CASES)
def test_logits_equal_those_of_transformers_at_every_parallel_size(tmp_path, arch, shape):
    source = write_tiny(tmp_path, arch, **SHAPES[shape], **BIASES.get(arch, {}))
    config = ModelConfig.from_directory(tmp_path)
    weights = source.state_dict()
    sequences = prompts(config.vocab_size)
    wanted = reference(source, sequences)

    def work(tp):
        results = []
        for layout in ("plain", "tiles"):
            session = Session(loaded(config, tp, weights, layout=layout), sequences)
            before = tp.all_reduces
            results.append(session.advance([len(s) for s in sequences]))
            if tp.size > 1:
                assert tp.all_reduces - before == 2 * config.num_layers + 1
        return results

    for size in (1, 2, 4):
        for rank_results in run_ranks(size, work):
            for got in rank_results:
                for ours, theirs in zip(got, wanted, strict=True):
                    assert ours.shape == theirs.shape
                    assert (ours - theirs).abs().max() < 1e-4
                    mine, other = ours.log_softmax(-1), theirs.log_softmax(-1)
                    assert (mine - other).abs().max() < 1e-4
                    top = theirs.topk(2).values
                    clear = top[:, 0] - top[:, 1] > 1e-3
                    assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])
                    assert clear.float().mean() > 0.9


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_as_close_to_float32_as_transformers_is(tmp_path, arch):
    """Two roundings of one computation, each judged by float32 on the same weights.

    Of all logprobs: the mean and the 99th percentile of the distance, and the largest one. With
    these wide weights transformers is off by up to 0.26 itself, so no absolute bound would hold.
    """
    source = write_tiny(tmp_path, arch, dtype=torch.bfloat16)
    config = ModelConfig.from_directory(tmp_path)
    assert config.dtype == torch.bfloat16
    sequences = prompts(config.vocab_size)
    wanted = torch.cat(reference(source, sequences)).log_softmax(-1)
    exact = torch.cat(reference(source.float(), sequences)).log_softmax(-1)
    theirs = (wanted - exact).abs().flatten()
    weights = {k: v.bfloat16() for k, v in source.state_dict().items()}

    def work(tp):
        model = loaded(config, tp, weights, dtype=torch.bfloat16)
        return Session(model, sequences).advance([len(s) for s in sequences])

    for size in (1, 2):
        for got in run_ranks(size, work):
            assert all(logits.dtype == torch.bfloat16 for logits in got)
            ours = (torch.cat(list(got)).float().log_softmax(-1) - exact).abs().flatten()
            assert ours.mean() < 1.25 * theirs.mean()
            assert ours.quantile(0.99) < 1.25 * theirs.quantile(0.99)
            assert ours.max() < 2 * theirs.max()


@pytest.mark.parametrize("size", [1, 2])
def test_chunks_and_single_tokens_over_pages_give_the_logits_of_one_pass(tmp_path, size):
    source = write_tiny(tmp_path, "qwen3")
    config = ModelConfig.from_directory(tmp_path)
    sequences = prompts(config.vocab_size)
    wanted = reference(source, sequences)

    def work(tp):
        session = Session(loaded(config, tp, source.state_dict()), sequences)
        got = [[] for _ in sequences]
        steps = [[7, 3, 20], [1, 0, 1], [0, 3, 5]] + [[1, 0, 1]] * 7 + [[4, 0, 0]]
        for step in steps:
            for rows, part in zip(got, session.advance(step), strict=True):
                rows.append(part)
        assert session.done == [len(s) for s in sequences]
        return [torch.cat(rows) for rows in got]

    for got in run_ranks(size, work):
        for ours, theirs in zip(got, wanted, strict=True):
            assert (ours - theirs).abs().max() < 1e-4


def test_only_the_rows_asked_for_get_logits(tmp_path):
    source = write_tiny(tmp_path, "llama")
    config = ModelConfig.from_directory(tmp_path)
    model = loaded(config, TensorParallel(), source.state_dict())
    sequences = prompts(320)
    everything = torch.cat(Session(model, sequences).advance([19, 6, 33]))
    session = Session(model, sequences)
    wanted = torch.tensor([18, 24, 57])  # the last token of each
    rows = model(replace(session.batch([19, 6, 33]), logit_rows=wanted), session.kv)
    assert rows.shape == (3, 320)
    assert not rows.requires_grad
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.allclose(rows, everything[wanted], atol=1e-5)
