"""Rows of ``batch_invariant_linear`` have the same bits in any batch, threads and ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels.backends import backends
from torch import Tensor

from rollout.kernels import batch_invariant_linear, finish_sums, linear, segment_sums
from rollout.kernels.batch_invariant_linear import segments_of, tree_sum
from rollout.kernels.linear.cpu import level
from rollout.weights import PLAIN, Box, Layout, TileLayout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (67, 101), (130, 1000), (3, 5)], ids=str)
@pytest.mark.usefixtures("dots_in_order")
def test_a_row_has_the_same_bits_in_any_batch(
    shape: tuple[int, int], dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=rng).to(dtype)
    bias = torch.randn(shape[0], generator=rng).to(dtype)
    x = torch.randn(300, shape[1] + 7, generator=rng).to(dtype)[:, 3:-4]
    exact = linear.reference(x.double(), weight.double(), bias.double(), PLAIN, shape)
    for name, run in backends(batch_invariant_linear).items():
        set_threads(1)
        together = run(x, weight, bias, PLAIN, shape)
        relative = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(together.double(), exact, rtol=relative, atol=1e-4)
        if name == "reference":
            continue
        for cuts in ((1,) * 300, (2, 3, 4, 5, 286), (64, 17, 219), (299, 1)):
            slow = name == "triton" and not torch.cuda.is_available()  # the interpreter
            if slow and (len(cuts) > 4 or shape[1] > 500):
                continue
            set_threads(1 + len(cuts) % 2)
            parts = [run(r, weight, bias, PLAIN, shape) for r in x.split(cuts)]
            assert torch.equal(torch.cat(parts), together), f"{name} cut into {cuts[:3]} ..."


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [PLAIN, TileLayout(16)], ids=lambda layout: layout.name)
@pytest.mark.parametrize("shape", [(48, 64), (112, 200), (32, 1096)], ids=str)
@pytest.mark.usefixtures("dots_in_order")
def test_branches_of_ranks_make_the_whole_sum(
    shape: tuple[int, int], layout: Layout, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape, generator=rng) / shape[1] ** 0.5).to(dtype)
    bias = torch.randn(shape[0], generator=rng).to(dtype)
    x = torch.randn(37, shape[1], generator=rng).to(dtype)
    exact = linear.reference(x.double(), weight.double(), bias.double(), PLAIN, shape)
    relative = 1e-5 if dtype == torch.float32 else 2**-7
    for name, run in backends(batch_invariant_linear).items():
        if name == "triton" and (layout is not PLAIN or shape[1] > 500):
            continue  # what it reads is always plain; the interpreter is slow
        levels = [{"at_level": at} for at in range(level() + 1)] if name == "cpu" else [{}]
        for pinned in levels:
            whole = run(x, _stored(weight, layout), bias, layout, shape, 4, **pinned)
            torch.testing.assert_close(whole.double(), exact, rtol=relative, atol=1e-5)
            if name == "reference":  # torch's order depends on where its inputs lie
                continue
            alone = [run(r, _stored(weight, layout), bias, layout, shape, 4, **pinned)
                     for r in (x[:1], x[1:6], x[6:])]  # fmt: skip
            assert torch.equal(torch.cat(alone), whole)
            for ranks in (2, 4):
                branches = []
                for mine, part in zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True):
                    here = (mine, _stored(part, layout), None, layout, tuple(part.shape))
                    branches.append(run(*here, 4 // ranks, True, **pinned))
                made = backends(finish_sums)[name](tree_sum(branches), bias, dtype)
                assert torch.equal(made, whole), (name, ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_segments_by_themselves_are_those_of_the_tree(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 100, generator=rng).to(dtype) for n in (37, 21))
    for name, run in backends(segment_sums).items():
        wide = backends(batch_invariant_linear)[name]
        for segments in (1, 2, 4):
            apart = run(x, weight, segments)
            assert apart.shape == (segments, 37, 21)
            whole = wide(x, weight, None, PLAIN, (21, 100), segments, True)
            torch.testing.assert_close(tree_sum(list(apart)), whole, rtol=1e-5, atol=1e-5)
            if name == "cpu":
                assert torch.equal(tree_sum(list(apart)), whole)
        assert run(x[:0], weight, 4).shape == (4, 0, 21)


def test_inputs_are_cut_into_as_many_segments_as_divide_them() -> None:
    assert [segments_of(n, even=False) for n in (64, 100, 102, 51)] == [4, 4, 2, 1]
    assert [segments_of(n, even=True) for n in (64, 100, 102, 8)] == [4, 2, 1, 4]


def _stored(weight: Tensor, layout: Layout) -> Tensor:
    shape = tuple(weight.shape)
    storage = torch.zeros(layout.storage_shape(shape), dtype=weight.dtype)
    layout.write(storage, shape, Box.full(shape), weight.contiguous())
    return storage
