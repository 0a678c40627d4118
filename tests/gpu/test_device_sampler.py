"""The GPU's sampler gives what the other one gives, by the op's reference on a CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.sampling import fused_sampler, sampler
from rollout.engine.sampling.fused_sampler import FusedSampler, make_sampler
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.sampling.sampler import Sampler
from rollout.kernels import sample
from rollout.kernels.gpu_support import interpreted, triton_runs

VOCABULARY = 700
SETTINGS = (  # temperature, top_p, min_p, top_k
    (0.0, 1.0, 0.0, 0),
    (1.0, 1.0, 0.0, 0),
    (0.6, 1.0, 0.0, 0),
    (1.0, 0.7, 0.0, 0),
    (1.2, 0.9, 0.02, 20),
    (1.0, 1.0, 0.0, 3),
    (0.001, 1.0, 0.0, 40),
)


def _batch(*, edited: bool = False, top: int = -1) -> SamplingMetadata:
    """``edited``: of rows one has a bias, one penalties, one few tokens to draw, one a mask."""
    rows = len(SETTINGS)
    plain = SamplingMetadata(
        numbers=np.array([(t, p, m, 1, 0, 0) for t, p, m, _ in SETTINGS], np.float32),
        top_k=np.array([k for *_, k in SETTINGS], np.int64),
        seeds=np.arange(rows) + 11,
        counters=np.arange(rows) * 3,
        targets=np.array([4, 17], np.int64),
        num_top=np.full(rows + 2, top, np.int64),
    )
    if not edited:
        return plain
    plain.numbers[2, 3:] = (1.5, 0.5, 0.25)
    return replace(
        plain,
        edit_rows=np.zeros(1, np.int64),
        edit_ids=np.full(1, 7),
        edit_values=np.full(1, 50, np.float32),
        seen_ids=np.arange(0, VOCABULARY, 2),
        seen_counts=np.resize(np.array([0, 3], np.float32), VOCABULARY // 2),
        seen_rows=np.full(1, 2),
        seen_starts=np.array([0, VOCABULARY // 2]),
        allowed=np.array([(3, 8), (3, 9), (3, 600)]),
        mask_rows=np.full(1, 4),
        mask_bits=np.full((1, -(-VOCABULARY // 32)), 0x0F0F0F0F, np.int32),
    )


def _assert_equal(a: SamplerOutput, b: SamplerOutput) -> None:
    assert torch.equal(a.tokens, b.tokens)
    for name in ("raw", "processed", "log_kept_mass", "top_logprobs"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert torch.equal(a.top_ids, b.top_ids)
    for name in ("kept_counts", "kept_ids"):
        x, y = getattr(a, name), getattr(b, name)
        assert x is y is None or torch.equal(x, y)


def test_both_samplers_agree_on_every_setting() -> None:
    logits = (
        torch.randn(len(SETTINGS) + 2, VOCABULARY, generator=torch.Generator().manual_seed(2)) * 3
    )
    for dtype in (torch.float32, torch.bfloat16):
        values = logits.to(dtype)
        edited = _batch(edited=True, top=2)
        asking = {"kept_rows": np.arange(len(SETTINGS))}
        for batch in (_batch(), edited, replace(_batch(), **asking), replace(edited, **asking)):
            _assert_equal(FusedSampler().sample(values, batch), Sampler().sample(values, batch))


def test_edits_and_alternatives_are_not_lost() -> None:
    logits = (
        torch.randn(len(SETTINGS) + 2, VOCABULARY, generator=torch.Generator().manual_seed(2)) * 3
    )
    for batch in (_batch(edited=True), _batch(top=2)):
        given = logits.clone()
        found = FusedSampler().sample(logits, batch)
        assert torch.equal(logits, given)
        _assert_equal(found, Sampler().sample(logits, batch))
        among = found.top_ids == found.tokens[:, None]
        assert torch.equal(found.top_logprobs[among], found.raw[among.any(1)])
        assert among.any() == (batch.most_top > 0)
    tokens = FusedSampler().sample(logits, _batch(edited=True)).tokens.tolist()
    assert tokens[0] == 7
    assert tokens[3] in (8, 9, 600)
    assert tokens[4] % 8 < 4


def test_alternatives_to_an_impossible_token_of_a_prompt_are_numbers() -> None:
    logits = torch.randn(len(SETTINGS) + 2, VOCABULARY)
    logits[-1, 17] = -torch.inf
    found = FusedSampler().sample(logits, _batch(top=2))
    assert found.raw[-1] == -torch.inf
    _assert_equal(found, Sampler().sample(logits, _batch(top=2)))


def test_edited_rows_are_copied_into_an_area_of_bounded_size(monkeypatch) -> None:
    logits = torch.randn(len(SETTINGS) + 2, VOCABULARY)
    batch = replace(_batch(edited=True, top=2), kept_rows=np.array([0, 3, 4]))
    whole = FusedSampler().sample(logits, batch)
    monkeypatch.setattr(sampler, "CPU_SLICE", 2 * VOCABULARY + 1)
    monkeypatch.setattr(Sampler, "sample", None)
    bounded = FusedSampler()
    _assert_equal(bounded.sample(logits, batch), whole)
    assert bounded._others._area is not None
    assert bounded._others._area.numel() == 2 * VOCABULARY


def test_a_sampler_without_kernels_is_asked_only_for_what_no_kernel_does(monkeypatch) -> None:
    logits = torch.randn(len(SETTINGS) + 2, VOCABULARY)
    monkeypatch.setattr(Sampler, "sample", None)
    asking = replace(_batch(), kept_rows=np.zeros(1, np.int64))
    for batch in (_batch(), _batch(edited=True), _batch(top=2), asking):
        FusedSampler().sample(logits, batch)
    own = replace(_batch(top=2), top_modes=np.ones(len(SETTINGS), np.int64))
    with pytest.raises(TypeError):
        FusedSampler().sample(logits, own)


def test_a_cpu_keeps_its_own_sampler() -> None:
    assert type(make_sampler(torch.device("cpu"))) is Sampler


@pytest.mark.skipif(not (triton_runs() and interpreted()), reason="needs Triton's interpreter")
def test_no_row_of_a_deterministic_engine_depends_on_what_the_others_ask_for(monkeypatch) -> None:
    """By the kernels: rows of every kind together, and each alone."""
    monkeypatch.setattr(fused_sampler, "sample", sample.implementation("triton"))
    logits = (
        torch.randn(len(SETTINGS) + 2, VOCABULARY, generator=torch.Generator().manual_seed(2)) * 3
    )
    fused = make_sampler(torch.device("cuda"), deterministic=True)
    own = {
        "target_temperatures": np.array([1, 2], np.float32),
        "top_modes": np.array([0, 0, 0, 0, 0, 2, 0]),
    }
    together = replace(_batch(edited=True, top=2), kept_rows=np.array([2, 5]), **own)
    for values in (logits, logits.bfloat16()):
        plain = fused.sample(values, _batch(top=2))
        beside = fused.sample(values, replace(_batch(top=2), **own))
        found = fused.sample(values, together)
        rows = [slice(row, row + 1) for row in range(len(values))]
        alone = SamplerOutput.cat(
            [fused.sample(values[row], together.rows(row.start, row.stop)) for row in rows]
        )
        for name in ("tokens", "raw", "processed", "log_kept_mass", "top_ids", "top_logprobs"):
            column = getattr(plain, name)
            assert torch.equal(getattr(found, name), getattr(alone, name)), name
            assert torch.equal(getattr(found, name)[1], column[1]), name  # a row without anything
            for some in (slice(5), slice(6, 8)):
                assert torch.equal(getattr(beside, name)[some], column[some]), name
        assert torch.equal(found.kept_ids, alone.kept_ids)
