"""Building the C kernels: cached, safe among processes, and never required."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollout.kernels import rope_and_cache
from rollout.kernels.native import entry, library, native_status
from rollout.kernels.native.build import BuildError, load
from rollout.kernels.native.prototypes import sources

RUN = """
import logging, sys, torch
logging.basicConfig(stream=sys.stderr, format="LOG %(message)s")
torch.set_num_threads(2)
from rollout.kernels import rms_norm, silu_mul
from rollout.kernels.native import native_status
for _ in range(2):
    rms_norm(torch.ones(300, 512), torch.ones(512), 1e-6)
    silu_mul(torch.ones(2, 8))
print(native_status())
if sys.platform == "linux":
    files = {line.split()[-1] for line in open("/proc/self/maps")}
    print(sum("gomp" in name or "iomp" in name for name in files), "OpenMP runtimes")
"""


def test_without_a_compiler_references_run_and_one_line_says_so(tmp_path: Path) -> None:
    done = _finish(_start(tmp_path, CC="no-such-compiler"))
    assert "plain torch" in done.stdout
    assert done.stderr.count("LOG") == 1
    assert "no-such-compiler" in done.stderr


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BuildError, match="false failed"):
        load()


@pytest.mark.more
@pytest.mark.skipif(library() is None, reason="no C compiler here")
def test_processes_that_build_at_once_leave_one_library(tmp_path: Path, quick_cc: str) -> None:
    """And the library shares torch's OpenMP runtime instead of bringing a second one."""
    outputs = [
        _finish(process).stdout
        for process in [_start(tmp_path / "cache", CC=quick_cc) for _ in range(2)]
    ]
    (built,) = (tmp_path / "cache/rollout").iterdir()
    for output in outputs:
        assert output.startswith(f"native: {built}")
        if sys.platform == "linux":
            assert re.search(r"^1 OpenMP runtimes$", output, re.MULTILINE), output


@pytest.mark.skipif(library() is None, reason="no C compiler here")
def test_a_cache_that_cannot_be_written_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_cc: str
) -> None:
    monkeypatch.setenv("CC", quick_cc)
    (tmp_path / "rollout").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lib, how = load()
    assert lib.rollout_digest
    assert "built without a cache" in how


@pytest.mark.skipif(library() is None, reason="no C compiler here")
def test_no_compiler_fuses_a_product_with_a_sum_by_itself() -> None:
    """Rope in float32 has torch's bits: with one rounding less they would be others."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(shape, generator=generator)
        for shape in ((9, 4, 64), (9, 2, 64), *[(9, 64)] * 2)
    )
    found = []
    for name in ("reference", "cpu"):
        pages = [torch.zeros(3, 2, 4, 64) for _ in "kv"]
        run = rope_and_cache.implementation(name)
        found.append((run(q, k, k, cos, sin, *pages, torch.arange(9)), pages[0]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_status_is_one_line() -> None:
    assert "\n" not in native_status()
    assert native_status().split(":")[0] in ("native", "plain torch")


def _start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])
    settings = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": root, **environment}
    return subprocess.Popen(
        [sys.executable, "-c", RUN],
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=270)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.skipif(library() is None, reason="no native kernels here")
def test_a_call_has_as_many_arguments_as_the_c_function() -> None:
    for name in re.findall(r"EXPORT \w+ rollout_(\w+)", sources()):
        entry(name)
    for arguments in ((None,), (None, 0, 0)):
        with pytest.raises(TypeError, match="arguments"):
            entry("use_huge_pages")(*arguments)
