"""The GPU's sampler gives what the other one gives, by the op's reference on a CPU."""

from __future__ import annotations

import numpy as np
import torch

from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.sampling.fused_sampler import FusedSampler, make_sampler
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.sampling.sampler import Sampler

SETTINGS = (  # temperature, top_p, min_p, top_k
    (0.0, 1.0, 0.0, 0),
    (1.0, 1.0, 0.0, 0),
    (0.6, 1.0, 0.0, 0),
    (1.0, 0.7, 0.0, 0),
    (1.2, 0.9, 0.02, 20),
    (1.0, 1.0, 0.0, 3),
)


def _batch(*, edits: bool = False, top: int = -1) -> SamplingMetadata:
    rows, none = len(SETTINGS), np.empty(0, np.int64)
    return SamplingMetadata(
        numbers=np.array([(t, p, m, 1, 0, 0) for t, p, m, _ in SETTINGS], np.float32),
        top_k=np.array([k for *_, k in SETTINGS], np.int64),
        seeds=np.arange(rows) + 11,
        counters=np.arange(rows) * 3,
        targets=np.array([4, 17], np.int64),
        num_top=np.full(rows + 2, top, np.int64),
        edit_rows=np.zeros(int(edits), np.int64),
        edit_ids=np.full(int(edits), 7, np.int64),
        edit_values=np.full(int(edits), 50, np.float32),
        seen_ids=none,
        seen_counts=np.empty(0, np.float32),
        seen_rows=none,
        seen_starts=np.zeros(1, np.int64),
    )


def _assert_equal(a: SamplerOutput, b: SamplerOutput) -> None:
    assert torch.equal(a.tokens, b.tokens)
    for name in ("raw", "processed", "log_kept_mass", "top_logprobs"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert torch.equal(a.top_ids, b.top_ids)


def test_both_samplers_agree_on_every_setting() -> None:
    logits = torch.randn(len(SETTINGS) + 2, 700, generator=torch.Generator().manual_seed(2)) * 3
    for dtype in (torch.float32, torch.bfloat16):
        values = logits.to(dtype)
        _assert_equal(FusedSampler().sample(values, _batch()), Sampler().sample(values, _batch()))


def test_edits_and_alternatives_are_not_lost() -> None:
    logits = torch.randn(len(SETTINGS) + 2, 700, generator=torch.Generator().manual_seed(2)) * 3
    for batch in (_batch(edits=True), _batch(top=2)):
        _assert_equal(FusedSampler().sample(logits, batch), Sampler().sample(logits, batch))
    assert int(FusedSampler().sample(logits, _batch(edits=True)).tokens[0]) == 7


def test_a_cpu_keeps_its_own_sampler() -> None:
    assert type(make_sampler(torch.device("cpu"))) is Sampler


def test_a_deterministic_engine_has_one_sampler_whatever_the_rows_beside_a_row_ask_for() -> None:
    assert type(make_sampler(torch.device("cuda"), deterministic=True)) is Sampler
