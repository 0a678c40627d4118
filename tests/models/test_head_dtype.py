"""Logits in float32 from bfloat16 weights and hidden states."""

from __future__ import annotations

import pytest
import torch
from rank_threads import Session, run_ranks
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.config import EngineConfig
from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.models.build import build_model
from rollout.models.config.model import ModelConfig
from rollout.models.registry import Registry

BF16, F32 = torch.bfloat16, torch.float32


def built(config, tp, weights, layout, head_dtype, deterministic=False):
    model = build_model(
        config, tp, BF16, "cpu", layout, deterministic=deterministic, head_dtype=head_dtype
    )
    model.load_weights(weights.items())
    return model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
@pytest.mark.parametrize("layout", ["plain", "tiles"])
def test_a_float32_head_gives_the_exact_products_of_what_it_multiplies(
    tmp_path, monkeypatch, tied, layout
):
    """On one rank and two; weights are widened in several pieces, the last one shorter."""
    monkeypatch.setattr("rollout.models.layers.embedding.WIDENED", 64 * 48)
    source = write_tiny(tmp_path, "llama", dtype=BF16, vocab_size=331, tied=tied)
    config = ModelConfig.from_directory(tmp_path)
    weights = source.state_dict()
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"].bfloat16()
    hidden = torch.randn(
        5, config.hidden_size, generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    exact = hidden.double() @ head.double().T

    def work(tp):
        model = built(config, tp, weights, layout, F32)
        narrow = built(config, tp, weights, layout, None)
        return model.head.logits(hidden), narrow.head.logits(hidden)

    for size in (1, 2):
        for wide, narrow in run_ranks(size, work):
            assert (wide.dtype, narrow.dtype) == (F32, BF16)
            assert (wide - exact).abs().max() < 1e-6 * exact.abs().max()
            assert (narrow - exact).abs().max() > 1e-4 * exact.abs().max()


def test_a_float32_head_of_a_deterministic_model_keeps_a_row_its_bits(tmp_path):
    source = write_tiny(tmp_path, "qwen3", dtype=BF16)
    config = ModelConfig.from_directory(tmp_path)
    model = built(config, TensorParallel(), source.state_dict(), "tiles", F32, deterministic=True)
    hidden = torch.randn(
        33, config.hidden_size, generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    together = model.head.logits(hidden)
    assert together.dtype == F32
    assert torch.equal(torch.cat([model.head.logits(row) for row in hidden.split(1)]), together)
    assert model.empty_like().build.head_dtype == F32  # the shadow's, too


def test_the_engine_scores_with_the_head_that_its_setting_names(tmp_path):
    """Against the same bfloat16 hidden states, multiplied here."""
    source = write_tiny(tmp_path, "qwen3", dtype=BF16)
    config = ModelConfig.from_directory(tmp_path)
    prompt = list(range(3, 40))
    model = built(config, TensorParallel(), source.state_dict(), "plain", F32)
    (logits,) = Session(model, [prompt]).advance([len(prompt)])
    wanted = logits.double().log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
    errors = {}
    for head in ("float32", "auto"):
        with Rollout(
            str(tmp_path), device="cpu", head_dtype=head, num_threads=1, weight_layout="plain",
            num_kv_blocks=16,
        ) as engine:  # fmt: skip
            (out,) = engine.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))
        got = [row[token] for row, token in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)]
        errors[head] = (torch.tensor(got, dtype=torch.float64) - wanted).abs().max()
    assert errors["float32"] < 1e-6
    assert errors["auto"] > 1e-4


def test_a_head_dtype_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="head_dtype must be one of auto, float32"):
        EngineConfig(model="m", head_dtype="bfloat16")

    write_tiny(tmp_path, "llama", dtype=BF16)
    config = ModelConfig.from_directory(tmp_path)
    foreign = Registry().register_model(config.architecture, "torch.nn:Linear")
    with pytest.raises(ConfigError, match="does not reach Linear"):
        build_model(config, TensorParallel(), BF16, "meta", head_dtype=F32, registry=foreign)
