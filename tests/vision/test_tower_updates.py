"""Updates of models with a tower: what is live afterwards equals a fresh start, tower and all."""

from __future__ import annotations

import pytest
from adapted_models import shaken
from peft import LoraConfig, get_peft_model
from tiny_vision import END, PAD, START, check_greedy, picture, reference, write_vision

from rollout import Rollout, SamplingParams

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, logprobs=0)
PROMPT = [5, 6, START, PAD, END, 9, 8]
SETTINGS = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_num_batched_tokens": 10}


def held(engine):
    """Digests of what is live, by the names of files."""
    return engine._async.backend.digests(30.0)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_5"])
def test_an_update_brings_the_tower_and_equals_a_fresh_start(tmp_path, kind):
    first = write_vision(tmp_path / "first", kind)
    second = write_vision(tmp_path / "second", kind, seed=1)
    image = picture(1)

    def sampled(engine):
        [output] = engine.generate([PROMPT], GREEDY, images=[[image]])
        return output

    settings = {**SETTINGS, "enable_prefix_caching": False}
    with Rollout(tmp_path / "second", **settings) as engine:
        fresh, digests = sampled(engine), held(engine)
    assert any(name.startswith("visual.") for name in digests)
    with Rollout(tmp_path / "first", **settings) as engine:
        check_greedy(first, sampled(engine), [image])
        sampled(engine)
        figures = engine.metrics()
        kept = figures.encoder_cache_bytes
        assert (figures.encoder_cache_queries_total, figures.encoder_cache_hits_total) == (4, 3)
        assert kept == 12 * 48 * 4 * (3 if "qwen3_vl" in kind else 1)
        engine.update_weights(second)  # in memory, as modules have it
        live = sampled(engine)
        assert live.outputs[0].token_ids == fresh.outputs[0].token_ids
        assert live.outputs[0].logprobs.raw == fresh.outputs[0].logprobs.raw
        assert engine.metrics().encoder_cache_hits_total == 4  # nothing of the old tower
        assert held(engine) == digests
        assert not engine.check_weights(second).differing
        changed = {n: t.clone() for n, t in second.state_dict().items() if n != "lm_head.weight"}
        changed["model.visual.blocks.1.attn.qkv.weight"] += 0.25
        engine.update_weights(changed, partial=True)
        assert sampled(engine).outputs[0].logprobs.raw != fresh.outputs[0].logprobs.raw
        engine.update_weights(str(tmp_path / "second"))  # names of the files
        assert held(engine) == digests
        engine.sleep(1)
        engine.wake_up()
        assert sampled(engine).outputs[0].logprobs.raw == fresh.outputs[0].logprobs.raw


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_5"])
def test_a_peft_model_is_sent_merged_tower_and_all(tmp_path, kind, partial):
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj", "qkv"])
    model = shaken(get_peft_model(write_vision(tmp_path, kind), config), 1).eval()
    with Rollout(tmp_path, **SETTINGS) as engine:
        engine.update_weights(model, partial=partial)
        assert engine.check_weights(model).equal
        [output] = engine.generate([PROMPT], GREEDY, images=[[picture(1)]])
        merged = model.merge_and_unload()
        check_greedy(merged, output, [picture(1)])
        assert not engine.check_weights(merged).differing


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_each_token_is_of_the_version_it_names_when_an_update_commits_between(tmp_path, mode):
    models = [write_vision(tmp_path), write_vision(None, seed=1)]
    image = picture(2)
    asking = SamplingParams(max_tokens=150, temperature=0.0, logprobs=0)
    with Rollout(tmp_path, **SETTINGS) as engine:
        given = {"prompt_token_ids": PROMPT, "multi_modal_data": {"image": image}}
        outputs = engine.stream(given, asking)
        next(outputs)
        engine.pause_generation("keep")
        engine.update_weights(models[1], in_flight=mode)
        engine.resume_generation()
        *_, output = outputs
    [done] = output.outputs
    spans = done.weight_versions
    assert [span.version for span in spans] == [0, 1]
    prompt = output.prompt_token_ids
    for span, model in zip(spans, models, strict=True):
        if mode == "keep" and span.version:
            continue  # of KV of both
        rows = reference(model, [*prompt, *done.token_ids], [image])[len(prompt) - 1 : -1]
        for at in range(span.start, span.stop):
            assert abs(float(rows[at, done.token_ids[at]]) - done.logprobs.raw[at]) < 1e-4
    assert {span.version for span in done.kv_spans} == ({0, 1} if mode == "keep" else {1})
