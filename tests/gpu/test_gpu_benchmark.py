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
@pytest.mark.parametrize(
    ("name", "sections", "row"),
    [
        ("gpu", 15, "rl-1b"),
        pytest.param("cards", 3, "colocated", marks=pytest.mark.soak),
    ],
)
def test_every_section_runs_dry(tmp_path: Path, name: str, sections: int, row: str) -> None:
    command = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), "--dry-run"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=270,
    )
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["errors"] == {}, done.stdout + done.stderr
    assert done.returncode == 0
    assert len({row["section"] for row in found["rows"]}) == sections
    assert f"| {row} |" in (tmp_path / f"{name}.md").read_text()
