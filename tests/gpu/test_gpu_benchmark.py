"""The benchmark's own ways, with tiny shapes on a CPU; its figures there mean nothing."""

from __future__ import annotations

import json
import os
import signal
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


LOST = """
import os, signal, torch

def fails(report):
    report.add("before it", 1, "s")
    torch.cuda.is_available, torch.cuda.empty_cache = (lambda: True), lose
    lose()

def lose():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def is_killed(report):
    report.add("after it", 2, "s")
    os.kill(os.getpid(), signal.SIGKILL)

SECTIONS = (("fails", 9, fails), ("is-killed", 9, is_killed))
"""


def test_a_section_that_loses_the_device_or_the_process_costs_no_figure(tmp_path: Path) -> None:
    (tmp_path / "lost_sections.py").write_text(LOST)
    code = "import gpu; gpu.main('', 'lost_sections', 'gpu')"
    done = subprocess.run(
        [sys.executable, "-c", code, "--dry-run", "--out", str(tmp_path / "out")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "benchmarks")]),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = json.loads((tmp_path / "out/gpu.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["before it", "after it"]
    assert "an illegal memory access" in found["errors"]["fails"]
