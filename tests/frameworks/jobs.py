"""Scripts of this folder, each in a process of its own, over which other packages may lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forked import said_by

HERE = Path(__file__).parent


def run(
    script: str, *arguments: object, over: Path | None = None, launcher: Sequence[str] = (),
    env: Mapping[str, str] | None = None, limit: float = 270,
) -> list[Any]:  # fmt: skip
    """The JSON objects that ``script`` prints on lines of their own, first to last.

    ``over``: a folder of packages that come before all others; ``launcher``: what python runs, and
    with which arguments, instead of the script itself.
    """
    if over is None and not launcher:
        # Of a process that has imported torch and transformers: those are of no other kind.
        return _found(said_by(HERE / script, list(map(str, arguments)), env))
    path = [
        HERE / "imports_sooner",
        over,
        HERE.parents[1],
        HERE.parent,
        os.environ.get("PYTHONPATH"),
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launcher, str(HERE / script), *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(place) for place in path if place),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "NO_PROXY": "*",
            **(env or {}),
        },
        capture_output=True,
        text=True,
        timeout=limit,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return _found(done.stdout)


def _found(said: str) -> list[Any]:
    return [found for line in said.splitlines() for found in _documents(line)]


def _documents(line: str) -> Iterator[dict[str, Any]]:
    """Ranks that print at a time may do so in one line."""
    while line.startswith('{"'):
        found, end = json.JSONDecoder().raw_decode(line)
        yield found
        line = line[end:]
