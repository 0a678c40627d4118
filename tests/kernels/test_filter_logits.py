"""What ``filter_logits`` keeps of rows of every kind, and that a row does not depend on others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels.cases import filtered
from torch import Tensor

from rollout.kernels import filter_logits

VOCAB = 40_003
RUNS = list(filter_logits.implementations())


def rows_of(kind: str, rows: int = 2, vocab: int = VOCAB) -> Tensor:
    noise = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(len(kind)))
    return {
        "peaked": noise * 4,
        "flat": noise * 0.05,
        "steep": noise * 30,
        "tied": (noise * 2).round(),
        "all equal": torch.zeros(rows, vocab),
        "few allowed": noise.masked_fill(torch.arange(vocab) % 4001 != 7, float("-inf")),
        "bfloat16": (noise * 3).bfloat16(),
    }[kind]


KINDS = ("peaked", "flat", "steep", "tied", "all equal", "few allowed", "bfloat16")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", RUNS)
def test_top_k_keeps_the_k_largest_and_what_ties_with_the_last(run: str, kind: str) -> None:
    logits = rows_of(kind)
    ordered = logits.float().sort(descending=True).values
    for k in (1, 2, 50, 626, 3000, VOCAB - 1):
        edges, *_ = filter_logits.implementation(run)(*filtered(logits, k, 1.0, 0.0))
        assert torch.equal(edges, ordered[:, k - 1]), k


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", RUNS)
def test_top_p_keeps_the_fewest_of_enough_mass(run: str, kind: str) -> None:
    """After min_p and top_k, whose mass counts as the whole."""
    logits = rows_of(kind)
    x = logits.double()
    for k, min_p in ((0, 0.0), (300, 0.0), (0, 0.01)):
        for top_p in (1e-6, 0.1, 0.5, 0.9, 0.999, 0.9999999):
            _, _, _, _, _, *settings = arguments = filtered(logits, k, top_p, min_p)
            edges, *_ = filter_logits.implementation(run)(*arguments)
            settings[1] = torch.ones_like(settings[1])
            first, *_ = filter_logits.reference(*arguments[:5], *settings)
            for row, edge, low in zip(x, edges.double(), first.double(), strict=True):
                assert (row == edge).any()
                weights = (row - row.max()).exp().masked_fill(row < low, 0.0)
                wanted, slack = top_p * weights.sum(), 1e-7 * weights.sum()
                assert weights[row > edge].sum() < wanted + slack
                assert weights[row >= edge].sum() >= wanted - slack


@pytest.mark.parametrize("run", RUNS)
def test_sums_are_those_of_what_is_kept(run: str) -> None:
    for kind in KINDS:
        logits = rows_of(kind)
        edges, sums, mass = filter_logits.implementation(run)(*filtered(logits, 90, 0.95, 1e-4))
        x = logits.double()
        weights = (x - x.amax(-1, keepdim=True)).exp().masked_fill(x < edges[:, None], 0.0)
        segments = torch.nn.functional.pad(weights, (0, -VOCAB % 512)).view(len(x), -1, 512)
        torch.testing.assert_close(sums.double(), segments.sum(-1), rtol=2e-6, atol=1e-30)
        torch.testing.assert_close(mass, weights.sum(-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("run", RUNS)
def test_a_row_without_a_filter_or_without_a_number_keeps_everything(run: str) -> None:
    logits = rows_of("peaked", 3)
    logits[1, 5] = float("nan")
    arguments = list(filtered(logits, 7, 0.5, 0.1))
    arguments[5][2], arguments[6][2], arguments[7][2] = 0, 1.0, 0.0
    edges, sums, mass = filter_logits.implementation(run)(*arguments)
    assert edges[1:].eq(float("-inf")).all()
    assert edges[0] > 0
    assert mass[1].isnan()
    assert torch.equal(sums[2], arguments[3][2])
    assert mass[2] == arguments[4][2]


def test_a_row_has_the_same_bits_in_any_batch_on_any_number_of_threads(
    set_threads: Callable[[int], None],
) -> None:
    if "cpu" not in RUNS:
        pytest.skip("no C compiler here")
    run, results = filter_logits.implementation("cpu"), []
    logits = torch.cat([rows_of(kind, 1).float() for kind in KINDS])
    arguments = filtered(logits, 400, 0.97, 1e-5, 0.8)
    for threads in (1, 2):
        set_threads(threads)
        results.append(run(*arguments))
        alone = [run(*(a[i : i + 1] for a in arguments)) for i in range(len(logits))]
        results.append(tuple(torch.cat(parts) for parts in zip(*alone, strict=True)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)
