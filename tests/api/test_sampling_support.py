"""What filters left to draw from comes with each token, and makes a trainer's ratios exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import write_tiny
from torch import Tensor

from rollout import Completion, RequestOutput, Rollout, SamplingParams
from rollout.engine.sampling.fused_sampler import FusedSampler
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.sampling.sampler import Sampler
from rollout.engine.sequences.sequence import Sequence
from rollout.errors import InvalidRequest, TransferFailed
from rollout.generation import SamplingMask
from rollout.integrations.sampling_support import kept_logprobs
from rollout.rpc.convert import output_from_proto, output_to_proto

VOCAB = 320
PROMPTS = [[7, 3, 11, 200, 5], [9, 42], [300, 17, 4]]
FEW = tuple(range(40, 90))
KINDS = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.05},
    "all, tempered": {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "temperature": 0.7},
    "hot": {"top_p": 0.8, "temperature": 2.5},
    "tempered alone": {"temperature": 0.6},
    "nothing": {},
    "allowed": {"allowed_token_ids": FEW},
    "allowed, top_p, tempered": {"allowed_token_ids": FEW, "top_p": 0.5, "temperature": 1.3},
    "greedy": {"temperature": 0.0},
    "greedy, allowed": {"temperature": 0.0, "allowed_token_ids": FEW},
}
ASKED = SamplingParams(max_tokens=24, seed=5, ignore_eos=True, return_sampling_mask=True)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    path = tmp_path_factory.mktemp("support")
    return path, write_tiny(path, "qwen3")


@pytest.fixture(scope="module")
def engine(trainer) -> Iterator[Rollout]:
    with Rollout(
        str(trainer[0]), device="cpu", num_threads=1, num_kv_blocks=64, max_model_len=64,
        skip_tokenizer_init=True, async_scheduling=True,
    ) as running:  # fmt: skip
        yield running


def logits_of(model: torch.nn.Module, output: RequestOutput, one: Completion) -> Tensor:
    """Those that gave the output's tokens, by transformers."""
    ids = torch.tensor([output.prompt_token_ids + one.token_ids])
    return model(ids).logits[0, len(output.prompt_token_ids) - 1 : -1]


@pytest.fixture(scope="module")
def sampled(engine) -> dict[str, list[RequestOutput]]:
    """One call with a prompt of each kind: rows of all of them in each step."""
    params = [replace(ASKED, **kind) for kind in KINDS.values()]
    lengths = [p if p.greedy else replace(p, max_tokens=20 + i) for i, p in enumerate(params)]
    calls = [engine.generate([prompt] * len(params), lengths) for prompt in PROMPTS]
    return {kind: [call[i] for call in calls] for i, kind in enumerate(KINDS)}


@pytest.mark.parametrize("kind", KINDS)
def test_an_unchanged_policy_has_a_ratio_of_one(trainer, sampled, kind):
    for output in sampled[kind]:
        one = output.outputs[0]
        logits = logits_of(trainer[1], output, one)
        temperature = KINDS[kind].get("temperature", 1.0)
        ours = kept_logprobs(logits, one.token_ids, one.sampling_mask, temperature)
        ratio = (ours - torch.tensor(one.logprobs.processed)).exp()
        assert (ratio - 1).abs().max() < 1e-5
        ours.sum().backward()
        if one.sampling_mask.token_ids.size:  # over the whole vocabulary it would be another policy
            whole = (logits.detach() / (temperature or 1.0)).log_softmax(-1)
            plain = whole.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            assert (ours - plain).max() > 0.01
            kept = [
                float(row[ids].exp().sum().log())
                for row, ids in zip(
                    whole, map(torch.from_numpy, one.sampling_mask.rows()), strict=True
                )
            ]
            if "allowed" not in kind:
                assert np.abs(np.subtract(kept, one.logprobs.log_kept_mass)).max() < 1e-5


def test_kept_sets_are_what_the_filters_say(trainer, sampled):
    for kind in ("top_p", "top_k", "min_p"):
        output = sampled[kind][0]
        one = output.outputs[0]
        mask = one.sampling_mask
        with torch.no_grad():
            masses = logits_of(trainer[1], output, one).softmax(-1)
        assert len(mask) == len(one.token_ids) == len(mask.rows())
        for row, ids, token in zip(masses, mask.rows(), one.token_ids, strict=True):
            ordered, order = row.sort(descending=True)
            before = ordered.cumsum(0) - ordered
            rules = {"top_p": before < 0.9, "top_k": torch.arange(VOCAB) < 5,
                     "min_p": ordered >= 0.05 * ordered[0]}  # fmt: skip
            assert sorted(order[rules[kind]].tolist()) == ids.tolist()
            assert token in ids
    for kind in ("nothing", "tempered alone", "greedy"):
        mask = sampled[kind][0].outputs[0].sampling_mask
        assert not mask.counts.any()
        assert not mask.token_ids.size
    allowed = sampled["greedy, allowed"][0].outputs[0].sampling_mask
    assert all(row.tolist() == list(FEW) for row in allowed.rows())


def test_a_client_gets_the_same_sets_and_who_does_not_ask_none(engine, sampled):
    params = replace(ASKED, top_p=0.9, max_tokens=20)
    here = sampled["top_p"][0].outputs[0]
    with Rollout.connect(engine.address) as client:
        for output in client.stream(PROMPTS[0], params):
            one = output.outputs[0]
            assert len(one.sampling_mask) == len(one.token_ids)
    assert one.token_ids == here.token_ids
    assert (one.sampling_mask.counts == here.sampling_mask.counts).all()
    assert (one.sampling_mask.token_ids == here.sampling_mask.token_ids).all()
    [plain] = engine.generate(PROMPTS[:1], replace(params, return_sampling_mask=False))
    assert plain.outputs[0].sampling_mask is None
    assert plain.outputs[0].token_ids == here.token_ids
    message = output_to_proto(output)
    message.outputs[0].sampling_mask.counts[0] += 1
    with pytest.raises(TransferFailed, match="counts"):
        output_from_proto(message)


def test_both_samplers_tell_the_same_sets():
    """Rows of both kinds, in a batch that has to be cut into runs."""
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    asked = [*KINDS.values(), {"top_p": 0.3, "logit_bias": {3: 4.0}}]
    kinds = [
        replace(ASKED, **{"return_sampling_mask": i % 3 > 0, **kind})
        for i, kind in enumerate(asked)
    ]
    rows = [
        Sequence(seq_id=i, request_id="r", index=0, params=p, seed=i, prompt_token_ids=[1, 2])
        for i, p in enumerate(kinds)
    ]
    settings = SamplingMetadata.of(rows, np.zeros(len(rows), np.int64), np.empty(0, np.int64), [])
    whole, fused = (sampler.sample(logits, settings) for sampler in (Sampler(), FusedSampler()))
    assert len(whole.kept()) == 8
    for one, other in zip(whole.kept(), fused.kept(), strict=True):
        assert one.tolist() == other.tolist()
    asking = [row for row, p in enumerate(kinds) if p.return_sampling_mask]
    for row, kept in zip(asking, whole.kept(), strict=True):
        assert not len(kept) or int(whole.tokens[row]) in kept
        alone = SamplingMetadata.of([rows[row]], np.zeros(1, np.int64), np.empty(0, np.int64), [])
        assert Sampler().sample(logits[row : row + 1], alone).kept()[0].tolist() == kept.tolist()


def test_a_mask_of_other_tokens_is_refused():
    with pytest.raises(InvalidRequest, match="return_sampling_mask=True"):
        kept_logprobs(torch.zeros(1, 4), [1], None)
    logits, mask = torch.zeros(2, 8), SamplingMask.of([np.array([1, 2], np.int32)] * 2)
    assert kept_logprobs(logits, [1, 2], mask).tolist() == pytest.approx([-np.log(2)] * 2)
    for tokens, given, said in (
        ([1, 3], mask, "token 3, number 1, is none"),
        ([1], mask, "one row of logits"),
        ([1, 2], SamplingMask.of([np.array([1, 9], np.int32)] * 2), "outside the 8"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            kept_logprobs(logits, tokens, given)
