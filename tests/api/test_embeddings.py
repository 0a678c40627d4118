"""A prompt's last hidden state: that of transformers, whatever runs beside it."""

import threading

import pytest
import torch
from api.conftest import ENGINE
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.errors import InvalidRequest, PromptTooLong

pytestmark = pytest.mark.usefixtures("forked_ranks")

LONG = [(7 * n) % 300 + 3 for n in range(90)]
PROMPTS = [[1, 2, 3], LONG, [9], LONG[:64], [*LONG[:40], 5, 6]]
BESIDE = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


@torch.no_grad()
def wanted(model, normalize=True):
    rows = [model.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in PROMPTS]
    return [row / row.norm() if normalize else row for row in rows]


def check(outputs, expected, version):
    for output, ids, row in zip(outputs, PROMPTS, expected, strict=True):
        assert output.prompt_token_ids == ids
        assert torch.allclose(torch.tensor(output.embedding), row, rtol=0, atol=1e-4)
        assert output.weight_version == version
        assert output.kv_spans[-1].stop == len(ids)


def test_embedded_and_served_give_the_same_bits_beside_a_generation(engine, client, tmp_path):
    model = write_tiny(tmp_path, seed=2, tokenizer=True)
    engine.update_weights(model.state_dict())  # the engine is that of many tests
    expected = wanted(model)
    [alone] = engine.generate([LONG], BESIDE)
    engine.reset_prefix_cache()
    stream = engine.stream(LONG, BESIDE)
    next(stream)  # it runs
    here = engine.embed(PROMPTS)
    *_, beside = stream
    there = client.embed(PROMPTS)
    check(here, expected, engine.weight_version)
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids
    assert here[1].num_cached_tokens  # and still the last token was computed
    check(there, expected, engine.weight_version)
    assert there[0].embedding == here[0].embedding
    [text] = client.embed("Hello")
    assert text.embedding == client.embed(client.tokenize("Hello"))[0].embedding


def test_the_mean_is_over_all_tokens_in_however_many_steps_they_were_computed(
    engine, client, tmp_path
):
    model = write_tiny(tmp_path, seed=2, tokenizer=True)
    engine.update_weights(model.state_dict())
    prompts = [*PROMPTS, *[LONG * 5] * 2]  # more than a step's tokens; two alike
    engine.embed(prompts)  # what is in the prefix cache is computed all the same
    here = engine.embed(prompts, pooling="mean", dimensions=16)
    with torch.no_grad():
        states = [model.model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    for output, state in zip(here, states, strict=True):
        mean = state.mean(0)[:16]
        assert torch.allclose(torch.tensor(output.embedding), mean / mean.norm(), atol=1e-4)
        assert output.num_cached_tokens == 0
    there = client.embed(prompts[:2], pooling="mean", dimensions=16)
    assert torch.allclose(
        torch.tensor(there[1].embedding), torch.tensor(here[1].embedding), atol=1e-5
    )
    for face in (engine, client):
        with pytest.raises(InvalidRequest, match="one of last, mean"):
            face.embed([[1]], pooling="max")
        with pytest.raises(InvalidRequest, match="dimensions must be 1 to 64"):
            face.embed([[1]], dimensions=65)
    with pytest.raises(InvalidRequest, match="needs hidden_state"):
        SamplingParams(pooling="mean")


def test_without_normalisation_it_is_the_state_itself(engine, tmp_path):
    model = write_tiny(tmp_path, seed=2, tokenizer=True)
    engine.update_weights(model.state_dict())
    outputs = engine.embed(PROMPTS, normalize=False)
    for output, row in zip(outputs, wanted(model, normalize=False), strict=True):
        assert torch.allclose(torch.tensor(output.embedding), row, rtol=1e-4, atol=1e-4)
    assert engine.generate([1, 2])[0].hidden_state is None


def test_a_prompt_that_cannot_be_served_is_refused(engine, client):
    for face in (engine, client):
        with pytest.raises(InvalidRequest, match="empty"):
            face.embed([[]])
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            face.embed([[1, 2], [10**6]])
        with pytest.raises(PromptTooLong):
            face.embed([[1] * 513])


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.more)])
def test_in_chunks_with_preemption_and_after_an_update(tmp_path, size):
    expected = wanted(write_tiny(tmp_path, tokenizer=True))
    other = write_tiny(tmp_path / "other", seed=1, tokenizer=True)
    tight = {**ENGINE, "block_size": 8, "num_kv_blocks": 24, "max_model_len": 160}
    settings = {**tight, "max_num_batched_tokens": 32, "tensor_parallel_size": size}
    with Rollout(str(tmp_path), **settings) as engine:
        beside = [LONG[n : n + 30] for n in range(4)]
        alone = engine.generate(beside, BESIDE)
        ran = []
        thread = threading.Thread(target=lambda: ran.extend(engine.generate(beside, BESIDE)))
        thread.start()
        check(engine.embed(PROMPTS), expected, 0)
        thread.join(60)
        assert [o.outputs[0].token_ids for o in ran] == [o.outputs[0].token_ids for o in alone]
        assert engine.metrics().preemptions_total > 0
        engine.update_weights(other.state_dict())
        check(engine.embed(PROMPTS), wanted(other), 1)
