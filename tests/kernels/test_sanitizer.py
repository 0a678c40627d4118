"""No Triton kernel reads or writes out of bounds, and no program races another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.cases import Case, all_cases
from kernels.sanitizer import sanitized

from rollout import kernels
from rollout.kernels.gpu_support import interpreted, triton_runs
from rollout.weights import Box

pytestmark = pytest.mark.skipif(
    not (triton_runs() and interpreted()), reason="Triton's interpreter does not run here"
)


def _cases() -> dict[str, list[Case]]:
    """Of every op that has a Triton kernel."""
    part = (torch.randn(33, 50), (70, 50), Box((20, 0), (53, 50)))
    digests = Case("digest", "a part", lambda t: (part[0].to(t), *part[1:]))
    found: dict[str, list[Case]] = {}
    for case in (*all_cases(), digests):
        if "triton" in getattr(kernels, case.op).implementations():
            found.setdefault(case.op, []).append(case)
    return found


@pytest.mark.more
@pytest.mark.parametrize("op", sorted(_cases()))
def test_programs_stay_in_bounds_and_apart(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = getattr(kernels, op).implementation("triton"), 0
    for case in _cases()[op]:
        with sanitized(monkeypatch) as launches:
            run(*case.make(torch.bfloat16))
        for launch in launches:
            assert (launch.outside, launch.races()) == ([], []), case
        seen += len(launches)
    assert seen


def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def shift(x, out, by, step, width: tl.constexpr):
        at = tl.arange(0, width)
        values = tl.load(x + tl.program_id(0) * width + at + by)
        tl.store(out + tl.program_id(0) * step + at, values)

    def run(x: Any, out: Any, by: int, step: int = 4) -> tuple[list[str], list[str]]:
        with sanitized(monkeypatch) as launches:
            shift[(2,)](x, out, by, step, width=4)
        [launch] = launches
        return launch.outside, launch.races()

    x = torch.arange(12.0)
    assert run(x, torch.zeros(8), 2) == ([], [])
    assert run(x[:9], torch.zeros(8), 2)[0] == ["program 1: read outside of every tensor"]
    assert run(x, torch.zeros(8)[:6], 2)[0] == ["program 1: written outside of every tensor"]
    assert run(x, x[:8], 4) == ([], ["a program reads what another writes"])
    assert run(x, torch.zeros(8), 0, 3) == ([], ["two programs write to one place"])
