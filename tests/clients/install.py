"""Installs the clients whose pins exclude ours, each into a folder of its own.

    python tests/clients/install.py [NAME...]      all of tests/clients/*.txt without names

``.clients/NAME`` holds the packages of ``NAME.txt`` without their dependencies; put first in
PYTHONPATH it lies over this environment, whose torch it shares. A folder that is as its list says
is left as it is. Those that could not be made are named at the end, with status 1.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CLIENTS = HERE.parents[1] / ".clients"
LIMIT = 150  # seconds for each


def folder(name: str) -> Path | None:
    """Where client ``name`` is installed as its list says; None where it is not."""
    where = CLIENTS / name
    stamp = where / ".installed"
    return where if stamp.exists() and stamp.read_text() == _wanted(name) else None


def install(name: str) -> str | None:
    """Why it could not be done, or None."""
    where = CLIENTS / name
    shutil.rmtree(where, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(where)]
    try:
        done = subprocess.run(
            [*command, "-r", str(HERE / f"{name}.txt")], capture_output=True, text=True,
            timeout=LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not within {LIMIT} s"
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return lines[0] if lines else f"pip ended with {done.returncode}"
    (where / ".installed").write_text(_wanted(name))
    return None


def main() -> None:
    failed = {}
    for name in sys.argv[1:] or sorted(path.stem for path in HERE.glob("*.txt")):
        if folder(name) is None and (why := install(name)) is not None:
            failed[name] = why
    for name, why in failed.items():
        print(f"client {name} could not be installed: {why}", file=sys.stderr)
    sys.exit(1 if failed else 0)


def _wanted(name: str) -> str:
    text = (HERE / f"{name}.txt").read_text() + sys.version
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    main()
