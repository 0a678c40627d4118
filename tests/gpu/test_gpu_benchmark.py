"""The benchmark's own ways, with tiny shapes on a CPU; its figures there mean nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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
import os, signal, sys, torch

def fails(report):
    report.add("before it", 1, "s")
    torch.cuda.is_available, torch.cuda.empty_cache = (lambda: True), lose
    lose()

def lose():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def exits(report):
    sys.exit("a service did not start")

def is_killed(report):
    report.add("after it", 2, "s")
    os.kill(os.getpid(), signal.SIGKILL)

SECTIONS = (("fails", 9, fails), ("exits", 9, exits), ("is-killed", 9, is_killed))
"""
HANGS = """
import threading

def hangs(report):
    report.add("before it", 1, "s")
    threading.Event().wait()

SECTIONS = (("too-late", 9, hangs), ("hangs", 1, hangs))
"""


def _run(
    tmp_path: Path, sections: str, *options: str
) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Of a benchmark of these sections: how it ended, and its results."""
    (tmp_path / "these_sections.py").write_text(sections)
    code = "import gpu; gpu.GRACE = 0.1; gpu.main('', 'these_sections', 'gpu')"
    done = subprocess.run(
        [sys.executable, "-c", code, "--dry-run", "--out", str(tmp_path / "out"), *options],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "benchmarks")]),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done, json.loads((tmp_path / "out/gpu.json").read_text())


def test_a_section_that_loses_the_device_or_the_process_costs_no_figure(tmp_path: Path) -> None:
    done, found = _run(tmp_path, LOST)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [row["name"] for row in found["rows"]] == ["before it", "after it"]
    assert "an illegal memory access" in found["errors"]["fails"]
    assert "a service did not start" in found["errors"]["exits"]


def test_a_section_that_hangs_ends_the_run_and_shows_where(tmp_path: Path) -> None:
    done, found = _run(tmp_path, HANGS, "--seconds", "2")
    assert done.returncode == 1, done.stdout
    assert "in hangs" in done.stderr
    assert [(row["section"], row["name"]) for row in found["rows"]] == [("hangs", "before it")]
    assert found["errors"] == {"too-late": "left out: no time"}
