"""The commands and programs in README.md and below docs/, cut out so that they can be run.

A fenced ``python`` or ``sh`` block is one snippet. A line ``<!-- not run: REASON -->`` above it, or
``<!-- not run on this page: REASON -->`` anywhere above it, keeps it from being run; its syntax,
and the scripts and flags it names, are looked at all the same.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = ("python", "sh", "text")  # text: a layout or an output, nothing to run
COMMANDS = ("rollout", "python", "torchrun", "make", "pip", "curl", "git", "export", "pytest")

_FENCE = re.compile(r"```(\w*)\s*$")
_MARK = re.compile(r"<!-- not run( on this page)?: (.+?) -->\s*$")
_PRINTS = re.compile(r"#\s*prints (.+)$", re.MULTILINE)
_FILE = re.compile(r"#\s*(\w+\.py)\b")


@dataclass(frozen=True, slots=True)
class Snippet:
    page: str  # relative to the root
    line: int  # of its first line in the page, from 1
    language: str
    text: str
    reason: str = ""  # why it is not run

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def prints(self) -> list[str]:
        """What its comments "# prints X; remark" promise."""
        return [text.partition(";")[0].strip() for text in _PRINTS.findall(self.text)]

    @property
    def file(self) -> str | None:
        """The name of the file it is the whole of: its first line is a comment that says so."""
        match = _FILE.match(self.text)
        return match[1] if match else None

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of a ``sh`` snippet, comments apart."""
        lines = self.text.replace("\\\n", " ").splitlines()
        split = (shlex.split(line, comments=True) for line in lines)
        return [words for words in split if words]


def pages() -> list[Path]:
    docs = ROOT / "docs"
    return [ROOT / "README.md", *sorted([*docs.glob("*.md"), *docs.glob("frameworks/*.md")])]


def all_snippets() -> list[Snippet]:
    return [s for page in pages() for s in cut(page.read_text(), str(page.relative_to(ROOT)))]


def cut(text: str, page: str) -> Iterator[Snippet]:
    """The snippets of a page; ``ValueError`` where a block or a command would escape the tests."""
    lines = text.splitlines()
    whole_page = above = ""
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if mark := _MARK.match(line):
            above = mark[2]
            whole_page = above if mark[1] else whole_page
        elif fence := _FENCE.match(line):
            if fence[1] not in LANGUAGES:
                raise ValueError(f"{page}:{at}: a block in {fence[1]!r}, not in {LANGUAGES}")
            end = lines.index("```", at)
            body = "\n".join(lines[at:end]) + "\n"
            if fence[1] != "text":
                yield Snippet(page, at + 1, fence[1], body, above or whole_page)
            above, at = "", end + 1
        elif line.startswith("    ") and line.split()[0] in COMMANDS:
            raise ValueError(f"{page}:{at}: a command outside a fenced block: {line.strip()}")
        elif line.strip():
            above = ""
