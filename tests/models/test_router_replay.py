"""Router replay: the experts of each token come back, and may be told, here and in a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import write_tiny
from torch import Tensor

from rollout import RequestOutput, Rollout, SamplingParams
from rollout.engine.sequences.sequence import Sequence, Status
from rollout.errors import InvalidRequest
from rollout.generation.packed import pack
from rollout.integrations.router_replay import expert_batch, replayed_experts

pytestmark = pytest.mark.usefixtures("forked_ranks")

# Blocks for three sequences at a time, prompts in chunks: everything that may go wrong does.
ENGINE = {
    "device": "cpu", "num_threads": 1, "num_kv_blocks": 20, "block_size": 8, "max_model_len": 128,
    "max_num_batched_tokens": 24, "skip_tokenizer_init": True, "async_scheduling": True,
}  # fmt: skip
HEAD = [7, 3, 11, 200, 5, 9, 42, 17] * 4
PROMPTS = [[*HEAD, 3 + i, 90 + 7 * i, 12] for i in range(4)]
WANTED = SamplingParams(max_tokens=20, seed=1, n=2, ignore_eos=True, return_routed_experts=True)
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixture")
    model = write_tiny(path, "qwen3_moe")
    return path, model


@pytest.fixture(scope="module")
def engine(trainer) -> Iterator[Rollout]:
    with Rollout(str(trainer[0]), **ENGINE) as running:
        yield running


def chosen(model: torch.nn.Module, ids: list[int]) -> NDArray[np.int64]:
    """What transformers' routers choose: [tokens, layers, experts of a token]."""
    seen: list[Tensor] = []
    routers = [m for n, m in model.named_modules() if n.endswith("mlp.gate")]
    hooks = [m.register_forward_hook(lambda m, a, out: seen.append(out[2])) for m in routers]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy()


def assert_as_chosen(model: torch.nn.Module, outputs: list[RequestOutput]) -> None:
    for output in outputs:
        for one in output.outputs:
            ids = output.prompt_token_ids + one.token_ids
            assert one.routed_experts.shape == (len(ids) - 1, 2, 2)
            assert one.routed_experts.dtype == np.uint8
            theirs = chosen(model, ids)[:-1]
            assert (np.sort(one.routed_experts) == np.sort(theirs)).all()


def test_experts_come_back_through_chunks_forks_preemption_and_prefix_hits(trainer, engine):
    before = engine.metrics().preemptions_total
    assert_as_chosen(trainer[1], engine.generate(PROMPTS, WANTED))
    assert engine.metrics().preemptions_total > before
    [again] = engine.generate(PROMPTS[:1], replace(WANTED, n=1))
    assert again.num_cached_tokens >= 32
    assert_as_chosen(trainer[1], [again])
    [rest] = engine.generate(PROMPTS[:1], replace(WANTED, n=1, routed_experts_prompt_start=30))
    assert (rest.outputs[0].routed_experts == again.outputs[0].routed_experts[30:]).all()
    assert rest.sparse_layers == (True, True)


def test_a_prompt_that_begins_again_under_an_update_has_the_experts_of_the_new_weights() -> None:
    """Until it has given a token; those of what has given some, or has ended, stay."""
    rows = np.ones((5, 2, 2), np.uint8)
    for drawn, ended, stays in ((0, False, False), (1, False, True), (0, True, True)):
        seq = Sequence(
            seq_id=0, request_id="a", index=0, params=WANTED, seed=0, prompt_token_ids=[1] * 9
        )
        assert seq.experts is not None
        seq.experts.append(rows)
        for _ in range(drawn):
            seq.append(3, 0, -1.0, -1.0, 0.0)
        seq.status = Status.FINISHED if ended else Status.RUNNING
        seq.forget_kv()
        assert (seq.experts.stop == 5) is stays


@pytest.mark.more
def test_experts_are_of_the_version_that_a_token_names_whenever_an_update_comes(trainer, tmp_path):
    """Long prompts in chunks beside a short one, so that steps bring experts before the last."""
    path, model = trainer
    other = write_tiny(tmp_path, "qwen3_moe", seed=9)
    prompts, params = [PROMPTS[0][:5], *PROMPTS], replace(WANTED, n=1, max_tokens=6)
    with Rollout(str(path), **ENGINE) as engine, ThreadPoolExecutor(1) as pool:
        for turn in range(4):
            running = pool.submit(engine.generate, prompts, params)
            source = other if turn % 2 == 0 else model
            engine.update_weights(source, in_flight="recompute")
            for output in running.result(60):
                one = output.outputs[0]
                if len(one.weight_versions) == 1:
                    gave = model if one.weight_versions[0].version % 2 == 0 else other
                    assert_as_chosen(gave, [output])


def test_a_client_gets_the_same_experts_and_a_stream_no_more_than_its_tokens(engine):
    params = replace(WANTED, n=1, max_tokens=5)
    [here] = engine.generate(PROMPTS[:1], params)
    assert (
        engine.generate(PROMPTS[:1], replace(params, return_routed_experts=False))[0]
        .outputs[0]
        .routed_experts
        is None
    )
    with Rollout.connect(engine.address) as client:
        for output in client.stream(PROMPTS[0], params):
            one = output.outputs[0]
            assert len(one.routed_experts) == len(PROMPTS[0]) + len(one.token_ids) - 1
        there = output.outputs[0]
        assert (there.routed_experts == here.outputs[0].routed_experts).all()
        assert output.sparse_layers == here.sparse_layers
        told = replace(SCORED, routed_experts=there.routed_experts)
        ids = PROMPTS[0] + there.token_ids
        assert scores(client, ids, told) == scores(engine, ids, told)


def scores(engine: Rollout, ids: list[int], params: SamplingParams) -> list[float]:
    rows = engine.generate([ids], params)[0].prompt_logprobs
    assert rows is not None
    return [row[token] for row, token in zip(rows[1:], ids[1:], strict=True) if row is not None]


def gap(ours: Tensor | list[float], theirs: Tensor | list[float]) -> float:
    with torch.no_grad():
        return float((torch.as_tensor(ours) - torch.as_tensor(theirs)).abs().max())


def trained(model: torch.nn.Module, ids: list[int]) -> Tensor:
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize(
    "arch",
    [
        "qwen3_moe",
        *(
            pytest.param(arch, marks=pytest.mark.more)
            for arch in ("mixtral", "olmoe", "deepseek_v3", "glm4_moe", "qwen2_moe")
        ),
    ],
)
def test_told_experts_give_the_same_scores_in_the_engine_and_in_the_trainer(tmp_path, arch):
    """With other experts than either would choose: replay on both ends means the same."""
    model = write_tiny(tmp_path, arch)
    ids = PROMPTS[0]
    with Rollout(str(tmp_path), **ENGINE) as engine:
        output = engine.generate([ids], replace(WANTED, n=1))[0]
        own = output.outputs[0].routed_experts[: len(ids)]
        plain = scores(engine, ids, SCORED)
        assert gap(scores(engine, ids, replace(SCORED, routed_experts=own)), plain) < 1e-5
        other = ((own.astype(int) + 1) % 6).astype(np.uint8)
        told = scores(engine, ids, replace(SCORED, routed_experts=other))
        asked = [ids[:3], ids], [ids[3:], [1]]
        [first, _] = engine.score(*asked, routed_experts=[other, None])
        assert gap(told[2:], torch.from_numpy(first.logprobs)) < 1e-5
        with pytest.raises(InvalidRequest, match="a list of 1 arrays, one for each prompt"):
            engine.score([ids], routed_experts=other)
        with pytest.raises(InvalidRequest, match=r"got an array of float64 \[2, 2, 2\]$"):
            replace(SCORED, routed_experts=np.zeros((2, 2, 2)))
    assert gap(told, plain) > 0.1
    assert gap(trained(model, ids), plain) < 1e-4
    with replayed_experts(model, other) as replay:
        values = trained(model, ids)
        values.sum().backward()
    assert gap(values, told) < 1e-4
    assert replay.routed == other.size // 2
    assert len(ids) <= replay.differing <= replay.routed  # all of the first layer
    assert replay.differing_tokens == replay.tokens == len(ids)
    gates = [p for n, p in model.named_parameters() if n.endswith("gate.weight")]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in gates)
    again = trained(model, ids)
    assert gap(again, plain) < 1e-4


@pytest.mark.more
@pytest.mark.parametrize(
    "arch", ["gpt_oss", "llama4", "phimoe", "minimax_m2", "nemotron_h", "qwen3_next"]
)
def test_every_kind_of_mixture_tells_and_takes_experts(tmp_path, arch):
    """Those that no trainer's helper knows, too; some have layers without experts."""
    write_tiny(tmp_path, arch)
    with Rollout(str(tmp_path), **{**ENGINE, "block_size": 16}) as engine:
        [output] = engine.generate(PROMPTS[:1], replace(WANTED, n=1, max_tokens=6))
        experts = output.outputs[0].routed_experts
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        assert experts.shape[:2] == (len(ids) - 1, sum(output.sparse_layers))
        plain = scores(engine, ids, SCORED)
        assert gap(scores(engine, ids, replace(SCORED, routed_experts=experts)), plain) < 1e-4
        other = (experts.astype(int) + 1) % 6
        assert gap(scores(engine, ids, replace(SCORED, routed_experts=other)), plain) > 0.1


def test_the_last_token_has_no_row_where_nothing_is_drawn(trainer, engine):
    """Also where it is computed: for its hidden state, or as it is the only one."""
    for ids in (PROMPTS[0], [7]):
        for wanted in ({"prompt_logprobs": 0}, {"hidden_state": True}):
            params = replace(WANTED, n=1, max_tokens=0, **wanted)
            assert_as_chosen(trainer[1], engine.generate([ids], params))


def test_what_was_told_stays_out_of_the_prefix_cache(engine):
    ids = [250, *PROMPTS[0]]
    told = np.zeros((len(ids), 2, 2), np.uint8) + np.array([4, 5], np.uint8)
    free = replace(SCORED, prompt_logprobs=None, max_tokens=4)
    scores(engine, ids, replace(SCORED, routed_experts=told))
    first, second = (engine.generate([ids], free)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_a_batch_is_padded_and_a_trainer_told_in_one_pass(trainer, engine):
    _, model = trainer
    outputs = engine.generate(PROMPTS[:2], [replace(WANTED, n=1, max_tokens=m) for m in (4, 9)])
    ids = [o.prompt_token_ids + o.outputs[0].token_ids for o in outputs]
    length = max(map(len, ids))
    batch = torch.tensor([row + [0] * (length - len(row)) for row in ids])
    experts = expert_batch([o.outputs[0].routed_experts for o in outputs], length)
    with torch.no_grad(), replayed_experts(model, experts) as replay:
        logits = model(batch).logits
        free = model(batch).logits
    assert replay.routed == 2 * sum(len(row) - 1 for row in ids)
    assert replay.differing == 0
    assert torch.equal(logits, free)
    with pytest.raises(InvalidRequest, match="do not fit a batch"):
        expert_batch([np.zeros((9, 2, 2))], 4)


WRONG = [
    ({"routed_experts": np.zeros((3, 2, 2), int)}, "have shape .3, 2, 2.; this model and prompt"),
    ({"routed_experts": np.zeros((35, 2, 3), int)}, r"need .34 or 35, 2, 2."),
    ({"routed_experts": np.full((35, 2, 2), 6)}, "name expert 6, but there are 6"),
    ({"return_routed_experts": True, "routed_experts_prompt_start": 35}, "must be below"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG)
def test_wrong_experts_are_refused_by_name(engine, fields, said):
    with pytest.raises(InvalidRequest, match=said):
        engine.generate([PROMPTS[0]], replace(SCORED, **fields))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.zeros((3, 2)), "shape"),
        ([[[0.5]]], "integers"),
        (np.full((1, 1, 1), -1), "name experts in"),
        ({"data": "AAA", "shape": [1, 1, 1], "dtype": "uint8"}, "base64"),
        ({**pack(np.zeros((1, 1, 2), np.uint8)), "shape": [1, 1, 3]}, "as many bytes"),
        ({**pack(np.zeros((1, 1, 2), np.uint8)), "dtype": "object"}, "dtype of"),
        (pack(np.zeros((1, 2), np.uint8)), "3 dimensions"),
        ({"data": ""}, "have data"),
    ],
)
def test_what_is_no_array_of_experts_is_refused(value, said):
    with pytest.raises(InvalidRequest, match=f"routed_experts must .*{said}"):
        SamplingParams(prompt_logprobs=0, routed_experts=value)
    with pytest.raises(InvalidRequest, match="set prompt_logprobs"):
        SamplingParams(routed_experts=np.zeros((1, 1, 1), int))


def test_a_dense_model_and_a_trainer_say_what_they_have_not(tmp_path, trainer):
    with pytest.raises(InvalidRequest, match="return_routed_experts=True"):
        expert_batch([None], 3)
    dense = write_tiny(tmp_path)
    with Rollout(str(tmp_path), **ENGINE) as engine:
        for params in (WANTED, replace(SCORED, routed_experts=np.zeros((35, 2, 2), int))):
            with pytest.raises(InvalidRequest, match="no experts that could be told"):
                engine.generate([PROMPTS[0]], params)
    with (
        pytest.raises(InvalidRequest, match="no layers of experts"),
        replayed_experts(dense, np.zeros((1, 1, 1), int)),
    ):
        pass
    model = trainer[1]
    for experts, said in (
        (np.zeros((3, 1, 2), int), "2 layers"),
        (np.zeros((3, 2, 2), int), "were given for"),
        (np.full((35, 2, 2), 6), "must be in 0..5"),
    ):
        with pytest.raises(InvalidRequest, match=said), replayed_experts(model, experts):
            model(torch.tensor([PROMPTS[0]]))


@pytest.mark.more
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_tell_and_take_the_same_experts(trainer, expert_parallel):
    place = {"tensor_parallel_size": 2, "expert_parallel": expert_parallel}
    path, model = trainer
    with Rollout(str(path), **ENGINE, **place) as engine:
        outputs = engine.generate(PROMPTS, WANTED)
        assert_as_chosen(model, outputs)
        ids = PROMPTS[0]
        other = ((chosen(model, ids) + 1) % 6).astype(np.uint8)
        told = scores(engine, ids, replace(SCORED, routed_experts=other))
    with torch.no_grad(), replayed_experts(model, other):
        assert gap(trained(model, ids), told) < 1e-4
