"""Every implementation of every op gives what its reference gives, on every case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from kernels.backends import backends
from kernels.cases import DTYPES, Case, all_cases, attention, delta, packed_linear, ssd
from torch import Tensor

import rollout.kernels as kernels
from rollout.kernels.kv_codes import LARGEST
from rollout.kernels.linear.cpu import level
from rollout.kernels.op import Op

CASES = [pytest.param(case, marks=pytest.mark.more if case.broad else ()) for case in all_cases()]
TOLERANCE = {  # (relative, absolute) against float64
    torch.float32: (2e-6, 2e-6),
    torch.bfloat16: (2**-6, 1e-6),  # rounded twice: one unit before the weight may become two
    torch.float16: (2**-9, 1e-6),  # the same
}
ATTENTIONS = ("paged_attention", "batch_invariant_attention")
ATTENTION_TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (2**-7, 2e-3),
    torch.float16: (2**-10, 2e-4),
}
CODES = tuple(str(kind) for kind in LARGEST)


@pytest.fixture(params=(1, 2), ids=("one thread", "two threads"))
def threads(request: pytest.FixtureRequest, set_threads: Callable[[int], None]) -> Any:
    set_threads(request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_implementation_agrees_with_the_reference(case: Case, dtype: torch.dtype) -> None:
    """And in float32 with what float64 gives."""
    op = _op(case.op)
    wanted = _outputs(op.reference, case, case.make(dtype))
    exact = None
    if dtype == torch.float32:
        found = _outputs(op.reference, case, tuple(map(_to_double, case.make(dtype))))
        exact = [x.double() for x in found]
    for name, run in backends(op).items():
        got = _outputs(run, case, case.make(dtype))
        _agree(got, wanted, _tolerance(case, dtype, name), name)
        if exact is not None:
            _agree([x.double() for x in got], exact, _tolerance(case, dtype), f"{name}, float64")


@pytest.mark.parametrize("make", [delta, partial(delta, by_row=True), ssd])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_recurrence_gives_the_same_bits_however_its_tokens_are_cut(
    dtype: torch.dtype, make: Callable[..., Any]
) -> None:
    """Several of them may be taken in one pass over a state."""
    whole = make([(23, 23)], 2, 4, 20, 70, dtype)
    of_tokens, state, slots = [x for x in whole[:-3] if x.shape[:1] == (23,)], whole[-4], whole[-3]
    run = _native(kernels.ssd_scan if make is ssd else kernels.gated_delta_rule)
    again, parts, start = state.clone().fill_(7.0), [], 0
    wanted = run(*whole)
    for count in (5, 1, 9, 1, 7):
        cut = [
            x[start : start + count] if any(x is y for y in of_tokens) else x for x in whole[:-4]
        ]
        start += count
        bounds = torch.tensor([0, count], dtype=torch.int32)
        lengths = torch.tensor([start], dtype=torch.int32)
        parts.append(run(*cut, again, slots, bounds, lengths))
    assert torch.equal(torch.cat(parts), wanted)
    assert torch.equal(again[slots[0]], state[slots[0]])


@pytest.mark.parametrize("window", [0, 150, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_of_a_sequence_does_not_depend_on_its_batch(
    dtype: torch.dtype, window: int, threads: int
) -> None:
    """Alone or among others, whole or in chunks, decoded or prefilled: the same bits."""
    lengths = [200, 68, 131, 2100]
    q, k, v, starts, context, tables, scale = attention(
        [(n, n) for n in lengths], heads=14, dtype=dtype
    )
    run = _native(kernels.paged_attention)
    together = run(q, k, v, starts, context, tables, scale, window)
    for s, length in enumerate(lengths):
        rows, start = q[starts[s] : starts[s + 1]], 0
        for chunk in (64, 2, 1, length - 68, 1):
            stop = start + chunk
            alone = run(
                rows[start:stop],
                k,
                v,
                torch.tensor([0, chunk], dtype=torch.int32),
                torch.tensor([stop], dtype=torch.int32),
                tables[s : s + 1],
                scale,
                window,
            )
            assert torch.equal(alone, together[starts[s] + start : starts[s] + stop])
            start = stop


def test_attention_is_the_same_for_any_number_of_threads(
    set_threads: Callable[[int], None],
) -> None:
    arguments = attention([(90, 90), (1, 3000), (1, 5), (1, 1024)], dtype=torch.bfloat16)
    run, results = _native(kernels.paged_attention), []
    for count in (1, 2, 5):
        set_threads(count)
        results.append(run(*arguments))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_attention_never_reads_beyond_the_context() -> None:
    """Keys after the context, other blocks and padding hold NaN: none may reach the output."""
    q, k, v, starts, context, tables, scale = attention([(5, 37), (1, 70)], block=32)
    clean = [torch.full_like(cache, float("nan")) for cache in (k, v)]
    for s, length in enumerate(context.tolist()):
        for p in range(length):
            page = tables[s, p // 32]
            for cache, source in zip(clean, (k, v), strict=True):
                cache[page, :, p % 32] = source[page, :, p % 32]
    for run in backends(kernels.paged_attention).values():
        wanted = run(q, k, v, starts, context, tables, scale)
        assert torch.equal(run(q, *clean, starts, context, tables, scale), wanted)


@pytest.mark.parametrize("window", [1, 20, 150])
def test_attention_never_reads_before_its_windows(window: int) -> None:
    """Blocks that all of them have left belong to others: their entries name one that holds NaN."""
    arguments = attention([(5, 300), (1, 270), (1, 8)], block=32, window=window)
    q, k, v, starts, context, tables, *rest = arguments
    used = {int(page) for row in tables for page in row}
    other = next(page for page in range(len(k)) if page not in used)
    k[other], v[other] = float("nan"), float("nan")
    stale = tables.clone()
    for s, length in enumerate(context.tolist()):
        first = max(0, length - int(starts[s + 1] - starts[s]) + 1 - window)
        stale[s, : first // 32] = other
    assert not torch.equal(stale, tables)
    for run in backends(kernels.paged_attention).values():
        wanted = run(q, k, v, starts, context, tables, *rest)
        assert torch.equal(run(q, k, v, starts, context, stale, *rest), wanted)


def test_a_nan_in_the_context_is_seen() -> None:
    q, k, v, starts, context, tables, scale = attention([(1, 37)])
    v[tables[0, 0], 0, 3] = float("nan")
    for run in backends(kernels.paged_attention).values():
        assert run(q, k, v, starts, context, tables, scale)[0, 0].isnan().all()


@pytest.mark.parametrize(
    ("hidden", "length"), [(range(128), 300), (range(1024, 1152), 1300), ([1024], 1025)], ids=str
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of padding rows
def test_scores_of_minus_infinity_hide_their_keys_alone(hidden: Iterable[int], length: int) -> None:
    q, k, v, starts, context, tables, scale = attention([(1, length)], dim=16)
    for position in hidden:
        k[tables[0, position // 32], :, position % 32] = float("-inf")
    arguments = (q.abs(), k, v, starts, context, tables, scale)
    wanted = kernels.paged_attention.reference(*arguments)
    assert wanted.isfinite().all()
    relative, absolute = ATTENTION_TOLERANCE[torch.float32]
    for run in backends(kernels.paged_attention).values():
        torch.testing.assert_close(run(*arguments), wanted, rtol=relative, atol=absolute)


@pytest.mark.parametrize("scale", [0.0, -0.2])
def test_a_scale_that_is_not_positive_gives_what_the_reference_gives(scale: float) -> None:
    arguments = (*attention([(3, 40), (1, 37)])[:-1], scale)
    wanted = kernels.paged_attention.reference(*arguments)
    relative, absolute = ATTENTION_TOLERANCE[torch.float32]
    got = _native(kernels.paged_attention)(*arguments)
    torch.testing.assert_close(got, wanted, rtol=relative, atol=absolute)


def test_large_rows_use_several_threads_and_agree(threads: int) -> None:
    x = torch.randn(200, 2 * 896, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(2 * 896)
    for run in backends(kernels.silu_mul).values():
        torch.testing.assert_close(run(x), kernels.silu_mul.reference(x), rtol=2e-6, atol=2e-6)
    for norm in backends(kernels.rms_norm).values():
        wanted = kernels.rms_norm.reference(x, weight, 1e-6)
        torch.testing.assert_close(norm(x, weight, 1e-6), wanted, rtol=2e-6, atol=2e-6)


def test_a_packed_linear_gives_a_row_the_same_bits_in_any_batch(threads: int) -> None:
    """On every level of instructions that this machine has, for any cut of the rows."""
    run = _native(kernels.linear)
    for shape in ((112, 98), (288, 896), (160, 1090)):
        x, storage, bias, layout, _ = packed_linear(70, shape, bias=True, dtype=torch.bfloat16)
        exact = kernels.linear.reference(x.double(), storage.double(), bias.double(), layout, shape)
        for at in range(level() + 1):
            together = run(x, storage, bias, layout, shape, at_level=at)
            torch.testing.assert_close(together.double(), exact, rtol=2**-7, atol=1e-4)
            for cuts in ((1,) * 70, (2, 15, 16, 17, 20), (32, 38), (33, 31, 6)):
                parts = [run(r, storage, bias, layout, shape, at_level=at) for r in x.split(cuts)]
                assert torch.equal(torch.cat(parts), together)
            if shape[0] % 32 == 0:
                gated = _native(kernels.gated_linear)(x, storage, bias, layout, shape, at_level=at)
                assert torch.equal(gated, kernels.silu_mul(together))


def test_more_rows_than_a_cache_holds_are_multiplied_in_stretches(threads: int) -> None:
    x, storage, _, layout, shape = packed_linear(
        1100, (304, 1300), bias=False, dtype=torch.bfloat16
    )
    got = _native(kernels.linear)(x, storage, None, layout, shape)
    exact = kernels.linear.reference(x.double(), storage.double(), None, layout, shape)
    torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=1e-3)


def _op(name: str) -> Op[Any, Any]:
    op = getattr(kernels, name)
    assert isinstance(op, Op)
    return op


def _native(op: Any) -> Any:
    if "cpu" not in op.implementations():
        pytest.skip("no C compiler here")
    return op.implementation("cpu")


def _outputs(run: Any, case: Case, arguments: tuple[Any, ...]) -> list[Tensor]:
    result = run(*arguments)
    written = [arguments[i] for i in case.writes]
    if case.writes and not case.returns:
        return written
    return [*(result if isinstance(result, tuple) else [result]), *written]


def _agree(
    got: list[Tensor], wanted: list[Tensor], tolerance: tuple[float, float], name: str
) -> None:
    relative, absolute = tolerance
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=relative, atol=absolute, msg=lambda m: f"{name}: {m}")


def _to_double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _tolerance(case: Case, dtype: torch.dtype, name: str = "") -> tuple[float, float]:
    if case.name == "steep" and dtype == torch.float32:  # scores near 100 have fewer digits left
        return 2e-4, 2e-4
    table = ATTENTION_TOLERANCE if case.op in ATTENTIONS else TOLERANCE
    if name == "triton" and dtype == torch.float16 and case.name.endswith(CODES):
        dtype = torch.bfloat16  # the weights', by which values of codes are multiplied
    relative, absolute = table[dtype]
    dots = name == "cpu" and dtype == torch.bfloat16 and level() > 0
    if case.op in ATTENTIONS and (name == "triton" or dots):
        # Tensor cores and dot products take weights of 16 bits: the error is one of the largest
        # value, not of a sum in which values cancel.
        absolute = max(absolute, torch.finfo(dtype).eps if dtype != torch.float32 else 0)
    return relative, absolute
