"""Tokens and logprobs of prompts with images against transformers' own models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models.rank_threads import Session, loaded, run_ranks
from tiny_vision import (
    END,
    KINDS,
    PAD,
    START,
    check_greedy,
    picture,
    processor,
    reference,
    write_vision,
)

from rollout import Rollout, SamplingParams
from rollout.cli.main import main
from rollout.models.build import build_tables
from rollout.models.config.model import ModelConfig
from rollout.models.forward import VisualRows
from rollout.models.weight_io.table import check_tables

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0)
ONE = [5, 6, START, PAD, END, 9, 8]
TWO = [5, START, PAD, END, 7, 7, START, PAD, END, 9]
PICTURES = [picture(1), picture(2, 40, 17)]
PROMPTS = [ONE, TWO, [5, 6, 7, 8]]
IMAGES = [PICTURES[:1], PICTURES, []]


def check(engine, model):
    for output, pictures in zip(
        engine.generate(PROMPTS, GREEDY, images=IMAGES), IMAGES, strict=True
    ):
        check_greedy(model, output, pictures)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_those_of_transformers_whole_and_in_chunks(tmp_path, kind):
    model = write_vision(tmp_path, kind)
    check_tables(build_tables(ModelConfig.from_directory(tmp_path), 2))
    assert main(["check", str(tmp_path), "--device", "cpu"]) == 0
    settings = {"device": "cpu", "dtype": "float32", "block_size": 8}
    with Rollout(tmp_path, **settings) as engine:
        check(engine, model)
    with Rollout(tmp_path, max_num_batched_tokens=7, **settings) as engine:
        check(engine, model)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_share_the_decoder_give_what_transformers_gives_of_images(tmp_path, kind):
    """Each has the tower whole, and encodes by itself: two ranks, and more than key heads."""
    model, pictures = write_vision(tmp_path, kind), PICTURES[:1]
    config, ids = ModelConfig.from_directory(tmp_path), [5, 6, START, *[PAD] * 12, END, 9, 8]
    given, tokens = processor()(images=pictures, return_tensors="pt"), torch.tensor([ids])
    wanted, grid = reference(model, ids, pictures), given["image_grid_thw"]
    positions, _ = model.model.get_rope_index(
        tokens, mm_token_type_ids=(tokens == PAD).int(), image_grid_thw=grid
    )
    [rows] = (tokens[0] == PAD).nonzero(as_tuple=True)

    def work(tp):
        session = Session(loaded(config, tp, model.state_dict()), [ids])
        features = session.model.encode_visual(given["pixel_values"], tuple(grid[0].tolist()))
        seen = replace(
            session.batch([len(ids)]), positions=positions[:, 0],
            visual=VisualRows(rows, features),
        )  # fmt: skip
        return session.model(seen, session.kv).log_softmax(-1)

    for size in (2, 4):
        for got in run_ranks(size, work):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cut_within_an_image_changes_no_bit_of_a_deterministic_engine(tmp_path, dtype):
    write_vision(tmp_path)
    settings = {"device": "cpu", "dtype": dtype, "block_size": 8, "deterministic": True}
    said = []
    for budget in (64, 7):
        with Rollout(tmp_path, max_num_batched_tokens=budget, **settings) as engine:
            outputs = engine.generate(PROMPTS, GREEDY, images=IMAGES)
            said.append([(o.outputs[0].token_ids, o.outputs[0].logprobs.raw) for o in outputs])
    assert said[0] == said[1]
