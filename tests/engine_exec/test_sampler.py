"""The sampler against slow references, and its promises about batches and seeds."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from engine_exec.sampling import repeated, sampling_batch, sequence
from transformers.generation import logits_process as hf

from rollout.engine.sampling.fused_sampler import FusedSampler
from rollout.engine.sampling.sampler import Sampler, uniforms
from rollout.errors import InvalidRequest
from rollout.generation import SamplingParams

VOCAB = 1300  # two whole segments and a rest


def peaked(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def reference_distribution(logits: torch.Tensor, p: SamplingParams) -> tuple[torch.Tensor, float]:
    """Slow float64: the sampled distribution of one row and the log of the kept mass."""
    probs = torch.softmax(logits.double() / p.temperature, -1)
    kept = probs >= p.min_p * probs.max()
    if 0 < p.top_k < len(probs):
        kept &= logits >= logits.sort(descending=True).values[p.top_k - 1]
    if p.top_p < 1:
        rest = torch.where(kept, probs, 0.0)
        rest /= rest.sum()
        order = rest.sort(descending=True, stable=True)
        before = order.values.cumsum(0) - order.values
        keep = torch.zeros_like(kept)
        keep[order.indices[before < p.top_p]] = True
        kept &= keep
    mass = probs[kept].sum()
    return torch.where(kept, probs, 0.0) / mass, float(mass.log())


FILTERS = {
    "none": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 20},
    "top_k_1": {"top_k": 1},
    "top_k_all": {"top_k": VOCAB},
    "top_p": {"top_p": 0.8, "temperature": 0.7},
    "top_p_tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.05},
    "all": {"min_p": 0.01, "top_k": 50, "top_p": 0.9, "temperature": 1.3},
}


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_distribution(name):
    p = SamplingParams(**FILTERS[name])
    row = peaked(1, seed=3)[0]
    probs, log_mass = reference_distribution(row, p)
    draws = 4000
    out = Sampler().sample(row.expand(draws, -1), repeated(p, range(draws)))
    counts = torch.bincount(out.tokens, minlength=VOCAB).double()
    assert counts[probs == 0].sum() == 0
    common = probs * draws >= 5
    expected = torch.cat([probs[common] * draws, (probs[~common].sum() * draws)[None]])
    seen = torch.cat([counts[common], counts[~common].sum()[None]])
    expected, seen = expected[expected > 1], seen[expected > 1]
    chi2 = float(((seen - expected) ** 2 / expected).sum())
    freedom = max(len(expected) - 1, 1)
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)
    torch.testing.assert_close(
        out.log_kept_mass.double(), torch.full((draws,), log_mass).double(), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("name", FILTERS)
def test_processed_is_tempered_logprob_minus_log_kept_mass(name):
    p = SamplingParams(**FILTERS[name])
    logits = peaked(16, seed=4)
    out = Sampler().sample(logits, repeated(p, range(16)))
    tokens = out.tokens[:, None]
    tempered = torch.log_softmax(logits.double() / p.temperature, -1).gather(1, tokens)[:, 0]
    raw = torch.log_softmax(logits.double(), -1).gather(1, tokens)[:, 0]
    got = out.processed.double() + out.log_kept_mass.double()
    torch.testing.assert_close(got, tempered, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.raw.double(), raw, atol=1e-5, rtol=0)
    for i in range(16):
        exact = reference_distribution(logits[i], p)[0][out.tokens[i]].log()
        assert abs(float(exact) - float(out.processed[i])) < 1e-5


@pytest.mark.parametrize("filters", [{"top_p": 1e-6}, {"top_p": 0.9}, {"top_k": 1}])
def test_no_logprob_is_above_zero(filters):
    """Sums of exponentials round; the token that is left alone has all of the mass."""
    out = Sampler().sample(
        peaked(256, seed=5, scale=9.0), repeated(SamplingParams(**filters), range(256))
    )
    for given in (out.raw, out.processed, out.log_kept_mass):
        assert (given <= 0).all()


def mixed_sequences():
    settings = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 5, "logprobs": 3},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"logit_bias": {3: 4.0, 9: -100.0}, "logprobs": 0},
        {"temperature": 2.0, "top_k": 40, "top_p": 0.5, "min_p": 0.001},
        {"temperature": 0.0, "repetition_penalty": 1.5, "min_tokens": 8},
    ]
    return [
        sequence(
            SamplingParams(**kw), seed=100 + i, seq_id=i, output=range(5, 8 + i), stop_ids=(4, 5)
        )
        for i, kw in enumerate(settings)
    ]


@pytest.mark.parametrize("vocab", [37, 512, VOCAB, 40_000])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_the_others(vocab, threads, set_threads):
    sequences = mixed_sequences()
    logits = peaked(len(sequences), vocab, seed=5)
    set_threads(threads)
    sampler = Sampler()
    together = sampler.sample(logits, sampling_batch(sequences))
    backwards = sampler.sample(logits.flip(0), sampling_batch(sequences[::-1]))
    for i, s in enumerate(sequences):
        alone = sampler.sample(logits[i : i + 1], sampling_batch([s]))
        for name in ("tokens", "raw", "processed", "log_kept_mass"):
            one = getattr(alone, name)[0]
            assert one == getattr(together, name)[i], (i, name)
            assert one == getattr(backwards, name)[-1 - i], (i, name)


def test_slicing_the_rows_changes_nothing(monkeypatch):
    sequences = mixed_sequences()
    logits = peaked(len(sequences), seed=6)
    whole = Sampler().sample(logits, sampling_batch(sequences))
    monkeypatch.setattr("rollout.engine.sampling.sampler.CPU_SLICE", 2 * VOCAB)
    sliced = Sampler().sample(logits, sampling_batch(sequences))
    for name in ("tokens", "raw", "processed", "log_kept_mass", "top_ids", "top_logprobs"):
        assert torch.equal(getattr(whole, name), getattr(sliced, name)), name


def test_a_draw_depends_on_seed_and_position_only():
    p = SamplingParams(temperature=5.0)
    row = peaked(1)
    sampler = Sampler()

    def token(seed, length):
        batch = sampling_batch([sequence(p, seed=seed, output=[1] * length)])
        return int(sampler.sample(row, batch).tokens)

    assert token(1, 2) == token(1, 2)
    assert len({token(seed, 2) for seed in range(20)}) > 10
    assert len({token(1, length) for length in range(20)}) > 10


def test_uniforms_are_uniform_and_uncorrelated_between_neighbours():
    seeds, positions = np.divmod(np.arange(100_000), 100)
    values = uniforms(seeds, positions)
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, 64, (0, 1))[0]
    assert ((counts - 1562.5) ** 2 / 1562.5).sum() < 63 + 5 * math.sqrt(126)
    grid = values.reshape(1000, 100)
    for a, b in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
    assert uniforms(np.array([-1]), np.array([0]))[0] != uniforms(np.array([1]), np.array([0]))[0]


def test_none_but_the_allowed_tokens_are_drawn():
    allowed = (2, 700, VOCAB - 1)
    free, bound = SamplingParams(), SamplingParams(allowed_token_ids=allowed)
    logits = peaked(1, seed=5).expand(64, -1)
    batch = sampling_batch([sequence(bound if i % 2 else free, seed=i) for i in range(64)])
    for sampler in (Sampler(), FusedSampler()):
        out = sampler.sample(logits, batch)
        assert {*out.tokens[1::2].tolist()} <= {*allowed}
        assert len({*out.tokens[::2].tolist()} - {*allowed}) > 5
        want = torch.log_softmax(logits[0, list(allowed)].double(), 0)
        for token, logprob in zip(out.tokens[1::2].tolist(), out.processed[1::2], strict=True):
            assert float(logprob) == pytest.approx(float(want[allowed.index(token)]), abs=1e-5)
    for wrong in ([], [1.5], 3):
        with pytest.raises(InvalidRequest, match="allowed_token_ids must"):
            SamplingParams(allowed_token_ids=wrong)


def test_none_but_the_tokens_of_a_mask_are_drawn():
    """Bits of int32, the lowest first; rows without a mask beside them, and slices of both."""
    kept = [0, 31, 32, 700, VOCAB - 1]
    words = np.zeros((VOCAB + 31) // 32, np.uint32)
    for token in kept:
        words[token // 32] |= np.uint32(1 << token % 32)
    sequences = [sequence(SamplingParams(), seed=i) for i in range(64)]
    for one in sequences[1::2]:
        one.mask = words.view(np.int32)
    batch = sampling_batch(sequences)
    logits = peaked(1, seed=5, scale=1.0).expand(64, -1)
    for sampler in (Sampler(), FusedSampler()):
        out = sampler.sample(logits, batch)
        assert {*out.tokens[1::2].tolist()} <= {*kept}
        assert len({*out.tokens[::2].tolist()} - {*kept}) > 5
        part = sampler.sample(logits[10:20], batch.rows(10, 20))
        assert torch.equal(part.tokens, out.tokens[10:20])


def test_penalties_equal_those_of_transformers():
    prompt, output = [3, 5, 5, 7], [9, 9, 9, 3]
    row = peaked(1, seed=8)
    p = SamplingParams(
        temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.6
    )
    batch = sampling_batch([sequence(p, prompt=prompt, output=output)])
    want = hf.RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([prompt + output]), row.clone())
    for token in set(output):
        want[0, token] -= 0.6 * output.count(token) + 0.3
    target = int(want.argmax())
    out = Sampler().sample(row, batch)
    assert int(out.tokens) == target
    assert float(out.processed) == pytest.approx(
        float(torch.log_softmax(want.double(), -1)[0, target]), abs=1e-5
    )
    # A bias makes each penalised token the argmax in turn, so its own penalty shows.
    for token in {*prompt, *output}:
        p = SamplingParams(
            temperature=0.0,
            repetition_penalty=1.4,
            presence_penalty=0.3,
            frequency_penalty=0.6,
            logit_bias={token: 100.0},
        )
        biased = row.clone()
        biased[0, token] += 100.0
        want = hf.RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([prompt + output]), biased)
        for t in set(output):
            want[0, t] -= 0.6 * output.count(t) + 0.3
        out = Sampler().sample(row, sampling_batch([sequence(p, prompt=prompt, output=output)]))
        assert int(out.tokens) == token
        lse = float(torch.logsumexp(want.double(), -1))
        assert float(out.processed) == pytest.approx(float(want[0, token]) - lse, abs=1e-5)


def test_penalties_read_each_token_once_however_often_it_came():
    """As the answer grows, beside a row without penalties and one with others."""
    p = SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.2)
    grown = sequence(p, prompt=[3, 3, 5], blocks=range(2))
    others = [
        sequence(SamplingParams(temperature=0.0)),
        sequence(SamplingParams(temperature=0.0, presence_penalty=2.0), prompt=[1], output=[2, 2]),
    ]
    row = peaked(1, seed=13).expand(3, -1)
    for token in (7, 5, 7, 7, 40):
        grown.append(token, 0, 0.0, 0.0, 0.0)
        batch = sampling_batch([others[0], grown, others[1]])
        known = Counter(grown.token_ids), Counter(grown.output_token_ids)
        first, last = batch.seen_starts[:2]
        assert batch.seen_ids[first:last].tolist() == list(known[0])
        assert batch.seen_counts[first:last].tolist() == [known[1][t] for t in known[0]]
        fresh = sequence(p, prompt=[3, 3, 5], output=grown.output_token_ids)
        out = Sampler().sample(row, batch)
        alone = Sampler().sample(row, sampling_batch([others[0], fresh, others[1]]))
        assert torch.equal(out.tokens, alone.tokens)
        assert torch.equal(out.processed, alone.processed)


def test_a_mode_counts_where_alternatives_are_asked_for():
    """Else a row that asks for none would be drawn in another way beside one that does."""
    rows = [SamplingParams(logprobs=2), SamplingParams(top_logprobs_mode="tempered")]
    assert not len(sampling_batch([sequence(p) for p in rows]).top_modes)
    rows.append(SamplingParams(logprobs=1, top_logprobs_mode="tempered"))
    batch = sampling_batch([sequence(p) for p in rows])
    assert batch.top_modes.tolist() == [0, 0, 1]
    assert not len(batch.rows(0, 2).top_modes)


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        ({"top_k": 7}, hf.TopKLogitsWarper(7)),
        ({"top_p": 0.7}, hf.TopPLogitsWarper(0.7)),
        ({"min_p": 0.2}, hf.MinPLogitsWarper(0.2)),
    ],
)
def test_kept_tokens_equal_those_of_transformers(params, warper):
    row = peaked(1, vocab=60, seed=9, scale=1.5)
    kept = set(torch.isfinite(warper(None, row.clone())[0]).nonzero()[:, 0].tolist())
    draws = 6000
    out = Sampler().sample(row.expand(draws, -1), repeated(SamplingParams(**params), range(draws)))
    assert set(out.tokens.tolist()) == kept


def test_min_tokens_forbids_stopping_until_enough_are_out():
    row = torch.zeros(1, 10)
    row[0, 4] = 50.0
    p = SamplingParams(min_tokens=2, max_tokens=5)

    def draw(output):
        s = sequence(p, output=output, stop_ids=(4, 99))
        return int(Sampler().sample(row, sampling_batch([s])).tokens)

    assert draw([1]) != 4
    assert draw([1, 1]) == 4


def test_alternatives_are_the_most_likely_by_raw_logprob():
    logits = peaked(3, seed=11)
    sequences = [
        sequence(SamplingParams(logprobs=4, temperature=0.5)),
        sequence(SamplingParams()),
        sequence(SamplingParams(logprobs=2, temperature=0.0)),
    ]
    out = Sampler().sample(logits, sampling_batch(sequences))
    want = torch.log_softmax(logits, -1).topk(4)
    assert torch.equal(out.top_ids[0], want.indices[0].int())
    torch.testing.assert_close(out.top_logprobs[0], want.values[0], atol=1e-5, rtol=0)
    assert torch.equal(out.top_ids[2, :2], want.indices[2, :2].int())


def test_bfloat16_logits_are_sampled_in_float32():
    logits = peaked(8, seed=12).bfloat16()
    batch = repeated(SamplingParams(temperature=0.9), range(8))
    low, high = Sampler().sample(logits, batch), Sampler().sample(logits.float(), batch)
    assert torch.equal(low.tokens, high.tokens)
    assert torch.equal(low.processed, high.processed)


def test_logits_are_left_as_they_were():
    logits = peaked(9, seed=13)
    before = logits.clone()
    Sampler().sample(logits, sampling_batch(mixed_sequences()))
    assert torch.equal(logits, before)


def test_logits_without_a_number_give_some_token_and_no_crash():
    logits = torch.full((2, 40), float("nan"))
    params = [SamplingParams(), SamplingParams(top_p=0.5, top_k=3, min_p=0.1)]
    out = Sampler().sample(logits, sampling_batch([sequence(p) for p in params]))
    assert ((out.tokens >= 0) & (out.tokens < 40)).all()
    assert out.raw.isnan().all()


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_keeps_the_same_with_an_edit_that_changes_nothing(name):
    """An edited row goes by way of a float32 copy, another straight from bfloat16."""
    p = SamplingParams(**FILTERS[name])
    logits = peaked(12, 5000, seed=14).bfloat16()
    plain = Sampler().sample(logits, repeated(p, range(12)))
    edited = SamplingParams(**FILTERS[name], logit_bias={4999: 0.0})
    out = Sampler().sample(logits, repeated(edited, range(12)))
    for field in ("tokens", "raw", "processed", "log_kept_mass"):
        assert torch.equal(getattr(out, field), getattr(plain, field)), field


@pytest.mark.parametrize("mode", ["tempered", "processed"])
def test_alternatives_are_of_the_distribution_that_is_asked_for(mode):
    """Beside a row whose alternatives are raw."""
    shaped = {"temperature": 0.5, "top_k": 3, "logit_bias": {7: 9.0}, "repetition_penalty": 1.5}
    own = SamplingParams(**shaped, logprobs=5, top_logprobs_mode=mode)
    batch = [sequence(SamplingParams(temperature=0.5, logprobs=2), seed=1), sequence(own, seed=2)]
    logits = peaked(2, seed=5)
    out = Sampler().sample(logits, sampling_batch(batch))
    raw = out.top(0, 2)
    best = logits[0].log_softmax(-1).topk(2)
    assert dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)) == pytest.approx(
        {token: raw[token] for token in best.indices.tolist()}, abs=1e-5
    )

    edited = logits[1].clone()
    edited[7] += 9.0
    seen = edited[[1, 2, 3]]
    edited[[1, 2, 3]] = torch.where(seen < 0, seen * 1.5, seen / 1.5)
    tempered = (edited.double() / 0.5).log_softmax(-1)
    expected = tempered.topk(5 if mode == "tempered" else 3)
    values = expected.values
    if mode == "processed":
        values = values.log_softmax(-1)
    found = out.top(1, 5, mode)
    assert list(found) == expected.indices.tolist()
    assert list(found.values()) == pytest.approx(values.tolist(), abs=1e-5)
    token, value = int(out.tokens[1]), float(out.processed[1])
    beside = out.top(1, 0, mode)  # of the token alone
    assert list(beside) == [token]
    assert torch.tensor(beside[token]).item() == beside[token]
    assert found[token] == pytest.approx(
        value + (float(out.log_kept_mass[1]) if mode == "tempered" else 0.0), abs=1e-6
    )
