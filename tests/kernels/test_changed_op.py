"""Which elements changed: every implementation says what plain torch says, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels.backends import backends
from torch import Tensor

from rollout.kernels import changed

IMPLEMENTATIONS = backends(changed)
DTYPES = (torch.uint8, torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(params=IMPLEMENTATIONS)
def run(request: pytest.FixtureRequest) -> Callable[[Tensor, Tensor, int], Tensor | None]:
    return IMPLEMENTATIONS[request.param]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 63, 64, 65, 1000, 40_001])
@pytest.mark.parametrize("every", [1, 3, 97, 1 << 20])
def test_the_positions_are_those_of_the_reference(run, dtype, numel, every) -> None:
    generator = torch.Generator().manual_seed(numel)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator).to(torch.uint8)
    old = raw.view(dtype)
    new = old.clone()
    where = torch.arange(min(2, numel), numel, every)
    new.view(INTEGERS[dtype.itemsize])[where] ^= 1
    found = run(old, new, numel)
    assert found is not None
    assert found.dtype == torch.int64
    assert torch.equal(found, where)
    assert torch.equal(run(old, new, len(where)), where)
    if len(where):
        assert run(old, new, len(where) - 1) is None


def test_nan_equals_itself_and_signs_of_zero_differ(run) -> None:
    old = torch.tensor([[float("nan"), 0.0, 1.0]] * 9)
    new = old.clone()
    new[4, 1] = -0.0
    assert run(old, new, 27).tolist() == [13]
