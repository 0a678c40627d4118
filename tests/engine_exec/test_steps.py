"""Steps of hand-made batches on a tiny model, inline and on two ranks, against transformers."""

import pytest
import torch
from engine_exec.drive_executor import begin, generate, running, step
from engine_exec.sampling import sequence

from rollout.engine.sequences.sequence import ScheduledBatch, ScheduledEntry
from rollout.errors import EngineClosed, InvalidRequest
from rollout.generation import SamplingParams

PROMPTS = [list(range(3, 3 + n)) for n in (1, 5, 13, 4)]
NEW = 12


@pytest.fixture(scope="module", params=["inline", "inline_ahead", "tp1", "tp2"])
def executor(request, tiny, nothing_left):
    settings = {
        "executor": "inline" if "inline" in request.param else "multiprocess",
        "tensor_parallel_size": 2 if request.param == "tp2" else 1,
        "async_scheduling": request.param != "inline",
    }
    with running(tiny[0], **settings) as started:
        yield started


def greedy(model, prompt):
    with torch.no_grad():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("chunk", [1000, 3])
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(executor, tiny, chunk):
    _, model = tiny
    for s in generate(executor, PROMPTS, NEW, chunk=chunk):
        assert s.output_token_ids == greedy(model, s.token_ids[: s.prompt_len])
        with torch.no_grad():
            logits = model(torch.tensor([s.token_ids])).logits[0].float()
        expected = torch.log_softmax(logits, -1)[s.prompt_len - 1 : -1]
        expected = expected.gather(1, torch.tensor(s.output_token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(s.raw), expected, atol=1e-4, rtol=0)


def test_steps_begun_before_the_last_one_has_ended_draw_the_same(executor):
    params = SamplingParams(temperature=1.0, max_tokens=NEW, top_p=0.95)
    in_turn = generate(executor, PROMPTS, NEW, params, chunk=3)
    ahead = generate(executor, PROMPTS, NEW, params, chunk=3, ahead=True)
    assert [s.token_ids for s in ahead] == [s.token_ids for s in in_turn]
    assert [s.processed for s in ahead] == [s.processed for s in in_turn]


def test_a_step_follows_no_other_than_the_one_before_it(tiny):
    one = sequence(SamplingParams(), computed=0, blocks=range(2))
    first = ScheduledBatch([ScheduledEntry(one, 3)], number=4)
    with running(tiny[0], executor="inline") as executor:
        for number, lost in ((5, False), (6, True)):
            for future in begin(executor, first):
                future.result(10)
            entries = [ScheduledEntry(one, 1)]
            follow = ScheduledBatch(entries, number=number, previous_rows=[0])
            error = begin(executor, follow)[0].exception(10)
            assert (error is not None) is lost
            if lost:
                assert isinstance(error, RuntimeError)
                assert "the step before is missing" in str(error)


def test_samples_do_not_depend_on_their_batch(executor):
    params = SamplingParams(temperature=1.0, max_tokens=NEW, top_p=0.95)
    together = generate(executor, PROMPTS, NEW, params)
    chunked = generate(executor, PROMPTS, NEW, params, chunk=2)
    assert [s.token_ids for s in together] == [s.token_ids for s in chunked]


def test_prompt_logprobs_score_every_prompt_token(executor, tiny):
    _, model = tiny
    prompt = PROMPTS[2]
    params = SamplingParams(max_tokens=1, prompt_logprobs=2, logprobs=1)
    s = sequence(params, prompt=prompt, computed=0)
    out = step(executor, [(s, len(prompt))])
    with torch.no_grad():
        want = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
    assert len(out.tokens) == len(prompt)  # one drawn, and all but the first scored
    for position in range(len(prompt) - 1):
        got = out.top(1 + position, 2)
        best = want[position].topk(2).indices.tolist()
        assert set(got) == {*best, prompt[position + 1]}
        for token, logprob in got.items():
            assert logprob == pytest.approx(float(want[position, token]), abs=1e-4)
    assert int(out.tokens[0]) in out.top(0, 1)


def test_a_forward_makes_two_all_reduces_a_layer_and_one(executor, tiny):
    before = [f.result(10)[0]["all_reduces"] for f in executor.call("info", {})]
    step(executor, [(sequence(SamplingParams(), computed=0), 3)])
    after = [f.result(10)[0]["all_reduces"] for f in executor.call("info", {})]
    layers = tiny[1].config.num_hidden_layers
    expected = 0 if executor.size == 1 else 2 * layers + 1
    assert [b - a for a, b in zip(before, after, strict=True)] == [expected] * executor.size


def test_a_mistaken_call_fails_alone(executor):
    for future in executor.call("dance", {}):
        with pytest.raises(InvalidRequest, match="no method 'dance'"):
            future.result(10)
    assert generate(executor, [[1, 2]], 2)[0].output_len == 2


def test_replies_of_many_calls_match_their_calls(executor):
    calls = []
    for i in range(50):
        calls.append((executor.call("weight_info", {}), "tensors"))
        calls.append((executor.call("stage_digests", {"names": []}), "digests"))
        calls.append((executor.call("init_kv", {"num_blocks": 64 + i % 2}), None))
    for futures, key in calls:
        for future in futures:
            reply, _ = future.result(20)
            assert key is None or key in reply


def test_the_announced_weights_are_the_files(executor, tiny):
    for future in executor.call("weight_info", {}):
        reply = future.result(10)[0]
        names = {meta["name"] for meta in reply["tensors"]}
        assert names == set(tiny[1].state_dict())
        assert reply["dtype"] == "float32"


def test_a_sleeping_rank_refuses_steps_until_it_wakes(executor):
    before = generate(executor, PROMPTS, NEW)
    for future in executor.call("sleep", {"level": 1}):
        assert future.result(10)[0]["asleep"] == 1
    s = sequence(SamplingParams(), computed=0)
    with pytest.raises(EngineClosed, match="asleep"):
        step(executor, [(s, 3)])
    for future in executor.call("wake_up", {"tags": None}):
        assert future.result(10)[0]["asleep"] == 0
    after = generate(executor, PROMPTS, NEW)
    assert [s.token_ids for s in after] == [s.token_ids for s in before]
