"""What ``pip install`` of a source archive gives: the whole package, with its kernels compiled."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rollout.kernels.native import library
from rollout.kernels.native.build import LEVELS

ROOT = Path(__file__).parents[2]
RUN = """
import torch
from rollout.kernels import rms_norm
from rollout.kernels.native import native_status
assert rms_norm(torch.ones(3, 512), torch.ones(512), 1e-6).shape == (3, 512)
print(native_status())
"""

pytestmark = [
    pytest.mark.more,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        library() is None or platform.machine() != "x86_64", reason="no kernels for wheels here"
    ),
]


def test_a_wheel_of_the_source_archive_runs_its_kernels_without_a_compiler(
    tmp_path: Path, quick_cc: str
) -> None:
    sources = tmp_path / "sources"
    _run(sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "sdist", "-d", sources)
    (archive,) = sources.iterdir()
    pip = (sys.executable, "-m", "pip")
    options = ("-q", "--no-deps", "--no-build-isolation")
    compiling = {**os.environ, "CC": quick_cc}
    _run(*pip, "wheel", *options, str(archive), "-w", str(tmp_path), env=compiling)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    built = {Path(name).stem for name in names if name.endswith(".so")}
    assert built <= {name for name, *_ in LEVELS}
    assert "avx2" in built
    assert {"rollout/py.typed", "rollout/kernels/native/attention.c"} <= set(names)
    assert "rollout/server/http/dashboard.html" in names

    there = tmp_path / "there"
    _run(*pip, "install", *options, "--target", str(there), str(wheel))
    env = {**os.environ, "PYTHONPATH": str(there), "CC": "no-such-compiler"}
    said = _run(sys.executable, "-c", RUN, cwd=tmp_path, env=env)
    assert said.startswith(f"native: {there}/rollout/kernels/native/built/"), said


def _run(*command: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
