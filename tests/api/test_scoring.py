"""Logprobs of given tokens: those of transformers, whatever is cached, cut or runs beside them."""

import threading

import numpy as np
import pytest
import torch
from api.conftest import ENGINE
from shared_engines import eventually, standing_still
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.errors import InvalidRequest, PromptTooLong
from rollout.generation import RequestOutput, VersionSpan

pytestmark = pytest.mark.usefixtures("forked_ranks")

LONG = [(7 * n) % 300 + 3 for n in range(91)]
PROMPTS = [[1, 2, 3], LONG, [9], LONG, LONG[:33]]
COMPLETIONS = [[4], [5, 6, 7, 8, 9], LONG[:50], [11, 12], [3] * 17]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


@torch.no_grad()
def wanted(model, row, start, temperature=1.0):
    """float32 [T, vocabulary] of the tokens from ``start`` on."""
    logits = model(torch.tensor([row])).logits[0].float()
    return torch.log_softmax(logits / temperature, -1)[start - 1 : -1]


def check(outputs, model, rows, starts, *, top=0, temperature=1.0, version=None):
    for output, row, start in zip(outputs, rows, starts, strict=True):
        expected = wanted(model, row, start, temperature)
        ids = torch.tensor(row[start:])
        own = expected.gather(1, ids[:, None])[:, 0]
        assert (output.start, output.token_ids.tolist()) == (start, row[start:])
        assert output.logprobs.dtype == np.float32
        assert np.abs(output.logprobs - own.numpy()).max() < 1e-4
        best = expected.topk(top)
        assert output.top_ids.dtype == np.int32
        assert output.top_ids.shape == output.top_logprobs.shape == (len(ids), top)
        assert np.abs(output.top_logprobs - best.values.numpy()).max(initial=0) < 1e-4
        picked = expected.gather(1, torch.from_numpy(output.top_ids.astype(np.int64)))
        assert np.abs(output.top_logprobs - picked.numpy()).max(initial=0) < 1e-4
        rest = 1 - best.values.exp().sum(-1).clamp(max=1)
        assert np.abs(np.exp(output.rest_logprobs) - rest.numpy()).max() < 1e-4
        if version is not None:
            assert output.weight_versions == (VersionSpan(version, 0, len(ids)),)
            assert output.weight_version == version
            assert not output.is_mixed


def pairs(prompts=PROMPTS, completions=COMPLETIONS):
    rows = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
    return rows, [len(p) for p in prompts]


def test_completions_score_as_transformers_does_with_prefixes_found_and_requests_beside(
    engine, client, tmp_path
):
    model = write_tiny(tmp_path, seed=2, tokenizer=True)
    engine.update_weights(model.state_dict())  # the engine is that of many tests
    version = engine.weight_version
    [alone] = engine.generate([LONG[:40]], GREEDY)
    engine.reset_prefix_cache()
    stream = engine.stream(LONG[:40], GREEDY)
    next(stream)  # it runs
    here = engine.score(PROMPTS, COMPLETIONS, top_logprobs=5, temperature=0.7)
    *_, beside = stream
    check(here, model, *pairs(), top=5, temperature=0.7, version=version)
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids
    assert here[3].num_cached_tokens == 64  # whole blocks of the prompt that is there twice
    there = client.score(PROMPTS, COMPLETIONS, top_logprobs=5, temperature=0.7)
    check(there, model, *pairs(), top=5, temperature=0.7, version=version)
    assert [o.num_cached_tokens for o in there] == [0, 64, 0, 64, 32]
    again = engine.score(PROMPTS, COMPLETIONS, top_logprobs=5, temperature=0.7)
    for one, other in zip(there, again, strict=True):  # the same call on the same state
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert one.top_logprobs.tobytes() == other.top_logprobs.tobytes()
    whole = client.score([*PROMPTS[1:2], LONG * 5], last_n=30)
    check(whole, model, [LONG, LONG * 5], [61, len(LONG) * 5 - 30], version=version)
    check(engine.score([LONG]), model, [LONG], [1], version=version)
    [text] = client.score(["Hello"], [[7, 8]])
    ids = client.tokenize("Hello")
    check([text], model, [[*ids, 7, 8]], [len(ids)])


def test_generated_tokens_score_as_they_were_sampled_up_to_the_longest_sequence(engine):
    outputs = engine.generate(
        [[1, 2, 3], LONG * 5], SamplingParams(max_tokens=None, seed=3, ignore_eos=True)
    )
    for output in outputs:
        made = output.outputs[0]
        [scored] = engine.score([output.prompt_token_ids], [made.token_ids])
        assert len(made.token_ids) > 20
        assert np.abs(scored.logprobs - np.array(made.logprobs.raw)).max() < 1e-4
    assert len(outputs[0].prompt_token_ids) + len(outputs[0].outputs[0].token_ids) == 512
    logprobs = SamplingParams(max_tokens=3, prompt_logprobs=2, prompt_logprobs_start=60)
    [beside] = engine.generate([LONG], logprobs)
    assert beside.num_cached_tokens == 32  # of the prefix found, what needs no logits
    [scored] = engine.score([LONG], last_n=31, top_logprobs=2)
    assert beside.prompt_logprobs[:60] == [None] * 60
    own = [row[t] for row, t in zip(beside.prompt_logprobs[60:], LONG[60:], strict=True)]
    assert np.allclose(own, scored.logprobs, atol=1e-5)
    assert list(beside.prompt_logprobs[70])[:2] == scored.top_ids[10].tolist()


def test_what_cannot_be_scored_is_refused_by_its_row(engine, client):
    for face in (engine, client):
        for prompts, completions, said in (
            ([[1], []], [[2], [3]], "prompt 1 is empty"),
            ([[1], [2]], [[2], []], "completion 1 is empty"),
            ([[1], [2]], [[2]], "1 completions for 2 prompts"),
            ([[1]], None, "prompt 0 has one token"),
            ([[1]], [[10**6]], "outside the vocabulary"),
            ([[1]], [["a"]], "completion 0 is not a list of token ids"),
            ("Hello", None, "a list of texts"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                face.score(prompts, completions)
        with pytest.raises(PromptTooLong, match="513 tokens, but max_model_len is 512"):
            face.score([[1] * 500], [[2] * 13])
        for settings, said in (
            ({"temperature": 0.0}, "temperature must be in"),
            ({"top_logprobs": -1}, "top_logprobs must be"),
            ({"top_logprobs": 321}, "at most the vocabulary's"),
            ({"last_n": 0}, "last_n must be at least 1"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                face.score([[1]], [[2]], **settings)
    assert engine.score([], []) == []
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 1"):
        SamplingParams(max_tokens=0)
    with pytest.raises(InvalidRequest, match="there is no answer"):
        SamplingParams(max_tokens=0, prompt_logprobs=0, n=2)
    with pytest.raises(InvalidRequest, match="prompt_logprobs_start is 5, but"):
        engine.generate([[1, 2]], SamplingParams(prompt_logprobs=0, prompt_logprobs_start=5))


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.more)])
def test_in_chunks_with_preemption_and_across_an_update(tmp_path, size):
    model = write_tiny(tmp_path, tokenizer=True)
    other = write_tiny(tmp_path / "other", seed=1, tokenizer=True)
    tight = {**ENGINE, "block_size": 8, "num_kv_blocks": 24, "max_model_len": 160}
    settings = {**tight, "max_num_batched_tokens": 32, "tensor_parallel_size": size}
    with Rollout(str(tmp_path), **settings) as engine:
        beside = [LONG[n : n + 30] for n in range(4)]
        long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        alone = engine.generate(beside, long)
        ran: list[RequestOutput] = []
        thread = threading.Thread(target=lambda: ran.extend(engine.generate(beside, long)))
        thread.start()
        scored = engine.score(PROMPTS, COMPLETIONS, top_logprobs=3)
        check(scored, model, *pairs(), top=3, version=0)
        thread.join(60)
        assert [o.outputs[0].token_ids for o in ran] == [o.outputs[0].token_ids for o in alone]
        assert engine.metrics().preemptions_total > 0
        engine.update_weights(other.state_dict())
        check(engine.score(PROMPTS, COMPLETIONS), other, *pairs(), version=1)


def test_a_sequence_that_an_update_meets_says_which_weights_scored_what(tmp_path):
    model = write_tiny(tmp_path)
    other = write_tiny(tmp_path / "other", seed=1)
    row = LONG * 5
    settings = {**ENGINE, "max_num_batched_tokens": 16}
    with Rollout(str(tmp_path), **settings) as engine:
        for in_flight in ("keep", "recompute"):
            before = engine.weight_version

            def begin():
                outputs = []
                thread = threading.Thread(target=lambda: outputs.extend(engine.score([row] * 4)))
                thread.start()
                eventually(lambda: engine.metrics().running or not thread.is_alive())
                return thread, outputs

            thread, outputs = standing_still(begin, engine, running=1)
            engine.update_weights(other.state_dict(), in_flight=in_flight)
            engine.resume_generation()
            thread.join(60)
            assert len(outputs) == 4
            cut = 0
            for output in outputs:
                spans = output.weight_versions
                assert [s.stop for s in spans][-1] == len(row) - 1
                assert {s.version for s in spans} <= {before, before + 1}
                assert output.is_mixed == (len(spans) > 1)
                if len(spans) > 1:
                    cut = spans[0].stop
                    old = wanted(model, row, 1)[:cut].gather(
                        1, torch.tensor(row[1 : cut + 1])[:, None]
                    )
                    assert np.abs(output.logprobs[:cut] - old[:, 0].numpy()).max() < 1e-4
                elif spans[0].version == before + 1:
                    check([output], other, [row], [1])
            assert bool(cut) == (in_flight == "keep")
            engine.update_weights(model.state_dict())


def test_what_cannot_be_scored_is_told_in_the_words_of_the_call(engine) -> None:
    for asked, words in (
        ({"top_logprobs": -1}, r"^top_logprobs must be from 0 to the vocabulary's size .*, got -1"),
        ({"top_logprobs": None}, r"^top_logprobs must be 0 or more, got None"),
        ({"temperature": 0}, r"^temperature must be in \[1e-5, 1e9\], got 0"),
        ({"top_logprobs": 1 << 40}, r"by top_logprobs, where that was given"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            engine.score([[1, 2, 3]], **asked)
