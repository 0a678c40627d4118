"""No tracked text file holds what a merge left undone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from snippets import ROOT

_MARKS = ["-e", "^<{7} ", "-e", "^[|]{7} ", "-e", "^={7}$", "-e", "^>{7} "]


def conflicts(folder: Path, *options: str) -> list[str]:
    """``path:line:text`` of every conflict marker in the files that git knows there."""
    command = ["git", "grep", "-InE", *options, *_MARKS]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    if found.returncode > 1:
        pytest.skip(f"no checkout of git: {found.stderr.strip()}")
    return found.stdout.splitlines()


def test_no_conflict_is_left_in_a_file() -> None:
    assert conflicts(ROOT) == []


def test_every_line_of_a_conflict_is_seen(tmp_path: Path) -> None:
    lines = ["<" * 7 + " ours", "a", "|" * 7 + " base", "=" * 7, "b", ">" * 7 + " theirs"]
    (tmp_path / "page.md").write_text("\n".join(lines) + "\n")
    assert len(conflicts(tmp_path, "--no-index")) == 4
