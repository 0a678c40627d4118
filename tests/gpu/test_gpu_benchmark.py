"""The benchmark's own ways, with tiny shapes on a CPU; its figures there mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollout.kernels.gpu_support import triton_runs

ROOT = Path(__file__).parents[2]


@pytest.mark.more
@pytest.mark.skipif(not triton_runs() or torch.cuda.is_available(), reason="needs the interpreter")
def test_every_section_of_the_gpu_benchmark_runs_dry(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=270,
    )
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["errors"] == {}, done.stdout + done.stderr
    assert done.returncode == 0
    sections = {row["section"] for row in found["rows"]}
    assert sections == set(found["seconds"])
    assert len(sections) == 12
    assert "| decode-8b |" in (tmp_path / "gpu.md").read_text()
