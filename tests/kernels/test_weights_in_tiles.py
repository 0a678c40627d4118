"""Where weights lie in tiles without being asked to."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from rollout.kernels.linear import reads_tiles
from rollout.kernels.native import library

CPU = torch.device("cpu")


@pytest.mark.skipif(library() is None, reason="no C compiler here")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are x86-64's")
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="asks the kernel for the CPU type")
def test_bfloat16_weights_lie_in_tiles_wherever_vectors_are_at_least_those_of_avx2() -> None:
    from rollout.kernels.linear import cpu

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line for line in lines if line.startswith("flags")).split()
    width = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    assert cpu.vector_width() == width
    assert reads_tiles(CPU, torch.bfloat16) == (width >= 8)


def test_other_dtypes_and_devices_read_row_by_row() -> None:
    assert not reads_tiles(CPU, torch.float32)
    assert not reads_tiles(CPU, torch.float16)
    assert not reads_tiles(torch.device("meta"), torch.bfloat16)
