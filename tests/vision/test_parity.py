"""Tokens and logprobs of prompts with images against transformers' own models."""

from __future__ import annotations

import pytest
from tiny_vision import END, KINDS, PAD, START, check_greedy, picture, write_vision

from rollout import Rollout, SamplingParams
from rollout.cli.main import main
from rollout.models.build import build_tables
from rollout.models.config import ModelConfig
from rollout.models.weight_table import check_tables

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
