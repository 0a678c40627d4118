"""Files in the place of a GPU's memory, for a module of tests, and for processes of a trainer."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_models import write_tiny

from rollout.weight_sync.transports import cuda_memory

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu" / "pretended"))

from pretended_cuda import on_cpu


@contextmanager
def mapped_files(*more):
    """Until the last thread of an engine's rank, or of a sender, has let go of what it had mapped:
    it is unmapped as it was mapped. ``more``: further replacements.
    """
    with pytest.MonkeyPatch.context() as patch:
        for replacement in (*on_cpu.replacements(), *more):
            patch.setattr(*replacement)
        cuda_memory.runtime.cache_clear()
        yield
        for thread in threading.enumerate():
            if thread.name == "free-ipc":
                thread.join(10)
        gc.collect()
    cuda_memory.runtime.cache_clear()


def said_by_ranks(folder: Path, world: int, *flags: str):
    """What the first of so many ranks of ``mapped_job.py`` says of each of its cases."""
    for arch in ("qwen3", "qwen3_moe"):
        write_tiny(folder / arch, arch, num_layers=1, vocab_size=96, tied=arch == "qwen3")
    job = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "mapped_job.py")]
    jobs = [
        subprocess.Popen([*job, str(rank), str(world), str(folder), *flags], stdout=subprocess.PIPE)
        for rank in range(world)
    ]
    try:
        said, *_ = [one.communicate(timeout=240)[0].splitlines() for one in jobs]
        assert [one.returncode for one in jobs] == [0] * world
    finally:
        for one in jobs:
            one.kill()
            one.wait()
    return [json.loads(line) for line in said if line.startswith(b"[")]
