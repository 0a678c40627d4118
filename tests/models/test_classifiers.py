"""Score heads over every decoder that transformers puts one on: its logits, in chunks and ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from rank_threads import Session, loaded, run_ranks
from tiny_models import ARCHITECTURES, TEXTS, write_tiny
from torch import Tensor

from rollout.distributed import TensorParallel
from rollout.models.build import build_tables
from rollout.models.config.model import ModelConfig
from rollout.models.registry import Registry
from rollout.models.weight_io.table import check_tables

ROWS = [29, 6, 43]
STEPS = ([20, 3, 11], [8, 2, 31], [1, 1, 1])
QUICK = ("llama", "qwen2", "qwen3")


def classifier_name(arch: str) -> str:
    stem = ARCHITECTURES[arch][1].__name__.removesuffix("ForCausalLM")
    return f"{stem}{'Text' if arch in TEXTS else ''}ForSequenceClassification"


CLASSIFIED = [arch for arch in ARCHITECTURES if hasattr(transformers, classifier_name(arch))]


@pytest.mark.parametrize(
    "arch", [a if a in QUICK else pytest.param(a, marks=pytest.mark.more) for a in CLASSIFIED]
)
def test_logits_of_each_token_equal_those_of_transformers(tmp_path: Path, arch: str) -> None:
    source = write_tiny(tmp_path, arch, labels=3, num_key_value_heads=4)
    config = ModelConfig.from_directory(tmp_path)
    assert (config.architecture, config.labels) == (
        classifier_name(arch),
        ("LABEL_0", "LABEL_1", "LABEL_2"),
    )
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(0, 320, (n,), generator=generator).tolist() for n in ROWS]
    with torch.no_grad():
        wanted = [
            source.score(source.model(torch.tensor([ids])).last_hidden_state[0])
            for ids in sequences
        ]
    weights = source.state_dict()

    def work(tp: TensorParallel) -> list[Tensor]:
        model = loaded(config, tp, weights)
        session = Session(model, sequences)
        got: list[list[Tensor]] = [[] for _ in sequences]
        for counts in STEPS:
            logits, states = model.with_hidden_states(session.batch(counts), session.kv, 0)
            assert logits.shape == (0, config.vocab_size)
            for rows, part in zip(got, states.split(counts), strict=True):
                rows.append(part)
        return [torch.cat(rows) for rows in got]

    for size in (1, 2):
        for rank in run_ranks(size, work):
            for ours, theirs in zip(rank, wanted, strict=True):
                assert ours.dtype == torch.float32
                assert (ours - theirs).abs().max() < 1e-4, f"{arch} at {size}"


def test_the_tables_of_all_ranks_hold_the_head_whole_and_nothing_else_in_its_place(
    tmp_path: Path,
) -> None:
    source = write_tiny(tmp_path, "qwen2", labels=1, tied=True)  # which a classifier is not
    config = ModelConfig.from_directory(tmp_path)
    for size in (1, 2):
        tables = build_tables(config, size)
        check_tables(tables)
        assert set(tables[0].slots) == {name for name, _ in source.named_parameters()}
        assert not tables[0].aliases


def test_only_a_declared_decoder_of_text_alone_is_put_below_a_score_head() -> None:
    registry = Registry()
    for name, decoder in {
        "Qwen2ForSequenceClassification": "Qwen2ForCausalLM",
        "Gemma3TextForSequenceClassification": "Gemma3ForCausalLM",
        "BertForSequenceClassification": None,
        "Qwen3VLForSequenceClassification": None,
        "Qwen2ForCausalLM": None,
        "ForSequenceClassification": None,
    }.items():
        assert registry.decoder_of(name) == decoder
    own = registry.register_model("Qwen2ForSequenceClassification", "somewhere:Else")
    assert own.decoder_of("Qwen2ForSequenceClassification") is None
