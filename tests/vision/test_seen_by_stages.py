"""Images before a model in stages of a pipeline: the first one has the tower."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_vision import END, PAD, START, check_greedy, picture, write_vision

from rollout import Rollout, SamplingParams
from rollout.errors import ConfigError

pytestmark = pytest.mark.usefixtures("forked_ranks")
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, logprobs=0)
SEEN = [5, 6, START, PAD, END, 9, 8]
SETTINGS = {
    "device": "cpu", "num_threads": 1, "dtype": "float32", "block_size": 4, "num_kv_blocks": 128,
    "max_model_len": 200, "max_image_pixels": 4000,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
def test_images_and_long_texts_are_as_before_one_stage_and_updates_reach_the_tower(
    tmp_path: Path, kind: str
) -> None:
    models = [
        write_vision(tmp_path / name, kind, seed=seed, num_hidden_layers=6)
        for seed, name in enumerate("ab")
    ]
    images = [picture(1), picture(3)]
    long = [[7 * n % 300 for n in range(count)] for count in (150, 40)]  # run in parts
    found = []
    for stages in (1, 2):
        with Rollout(tmp_path / "a", pipeline_parallel_size=stages, **SETTINGS) as engine:
            told = []
            for model, name in zip(models, "ab", strict=True):
                outputs = engine.generate([SEEN] * 2, GREEDY, images=[[each] for each in images])
                for output, image in zip(outputs, images, strict=True):
                    check_greedy(model, output, [image])
                texts = engine.generate(long, GREEDY)
                told.append([out.outputs[0].logprobs.raw for out in (*outputs, *texts)])
                engine.update_weights(tmp_path / "b")
                assert engine.check_weights(str(tmp_path / "b")).equal, name
            found.append(told)
    assert found[0] == found[1]


def test_a_long_step_may_end_with_the_first_row_of_an_image(tmp_path: Path) -> None:
    """The places of that token, in time and in both directions, are one number."""
    write_vision(tmp_path, "qwen2_5_vl", num_hidden_layers=6)
    prompt, found = [*(7 * n % 300 for n in range(126)), START, PAD, END, 9, 8], []
    for stages in (1, 2):
        settings = {**SETTINGS, "max_num_batched_tokens": 128, "pipeline_parallel_size": stages}
        with Rollout(tmp_path, **settings) as engine:
            [output] = engine.generate([prompt], GREEDY, images=[[picture(3)]])
            found.append((output.outputs[0].token_ids, output.outputs[0].logprobs.raw))
    assert found[0] == found[1]


def test_a_first_stage_without_the_layers_that_see_is_refused(tmp_path: Path) -> None:
    write_vision(tmp_path)
    words = "the first 2 layers of Qwen3VLForConditionalGeneration are told what is seen"
    with pytest.raises(ConfigError, match=words):
        Rollout(tmp_path, pipeline_parallel_size=3, **SETTINGS)
