from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from quick_interpreter import quicken

from rollout.kernels.gpu_support import interpreted, triton_runs

if triton_runs() and interpreted():
    quicken()


@pytest.fixture
def dots_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies by numpy's BLAS, which on some CPUs gives a row other bits by
    its place in the tile. Here it adds product by product, as a tensor core's tile has one order
    for every row."""
    if not triton_runs():
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_: Any, a: Any, b: Any, total: Any, *_precision: Any) -> Any:
        sums = total.data.copy()
        for column, row in zip(a.data.T, b.data, strict=True):
            sums += column[:, None] * row
        return TensorHandle(sums, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def quick_cc(tmp_path: Path) -> str:
    """The C compiler without optimization, for tests that build and care for no speed."""
    script = tmp_path / "quick-cc"
    script.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "gcc")} "$@" -O0\n')
    script.chmod(0o755)
    return str(script)
