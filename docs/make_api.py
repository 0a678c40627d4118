"""Writes docs/api.md from the docstrings and dataclasses of the public names.

    python docs/make_api.py [--check]

``--check`` writes nothing and exits with 1 where the page is out of date.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what it tells of lies beside it

import rollout
from rollout import errors, trainer_ops

PAGE = Path(__file__).with_name("api.md")
HEAD = """\
# API

Made from the docstrings by `python docs/make_api.py`. Times are in seconds, sizes in bytes,
lengths in tokens. Everything here is imported from `rollout`, or from a module of it that heads it.
The words are explained in the [glossary](glossary.md).
Any verb may raise an `EngineError`; what else it raises is said with it.
"""


def page() -> str:
    parts = [HEAD, "## Rollout\n", *_class(rollout.Rollout), "## AsyncRollout\n"]
    parts += [_text(rollout.AsyncRollout), _async_table(), "## Settings and results\n"]
    for name in rollout.__all__:
        one = getattr(rollout, name)
        if name not in ("Rollout", "AsyncRollout") and not issubclass(one, Exception):
            parts += [f"### {name}\n", _text(one)]
            parts += [_fields(one)] if is_dataclass(one) else list(_methods(one))
    parts += ["## trainer_ops\n", _text(trainer_ops)]
    for name in trainer_ops.__all__:
        one = getattr(trainer_ops, name)
        parts += [f"### trainer_ops.{name}\n"]
        parts += _methods(one) if inspect.isclass(one) else [_signature(name, one), _text(one)]
    return "\n".join([*parts, "## Errors\n", _errors()])


def public(cls: type[Any]) -> list[str]:
    """Methods and properties that a user calls, in the order of the source."""
    ours = [one for one in cls.__mro__ if one.__module__.startswith("rollout.")]
    names = dict.fromkeys(name for one in ours for name in vars(one))
    return [name for name in names if not name.startswith("_")]


def _class(cls: type[Any]) -> Iterator[str]:
    yield _text(cls)
    yield _signature(cls.__name__, cls)
    yield from _methods(cls)


def _methods(cls: type[Any]) -> Iterator[str]:
    for name in public(cls):
        member = inspect.getattr_static(cls, name)
        yield f"### {cls.__name__}.{name}\n"
        if isinstance(member, property):
            yield "A property.\n"
        elif callable(getattr(cls, name)):
            yield _signature(name, getattr(cls, name))
        yield _text(member.fget if isinstance(member, property) else getattr(cls, name))


def _async_table() -> str:
    lines = ["| verb | as in `Rollout`, or |", "|---|---|"]
    for name in public(rollout.AsyncRollout):
        same = name in public(rollout.Rollout)
        how = "the same, awaited" if same else _first(getattr(rollout.AsyncRollout, name))
        if name == "connect":
            how = "the same, not awaited: it connects at `start`, or with the first verb"
        elif name == "stream":
            how = "the same, for `async for`"
        lines.append(f"| `{name}` | {how} |")
    return "\n".join(lines) + "\n"


def _fields(cls: type[Any]) -> str:
    meaning = any("help" in f.metadata for f in fields(cls))
    lines = ["| field | type | default |", "|---|---|---|"]
    if meaning:
        lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for f in fields(cls):
        kind = str(f.type).replace("|", "\\|")
        row = f"| `{f.name}` | `{kind}` | {_default(f)} |"
        lines.append(f"{row} {f.metadata['help']} |" if meaning else row)
    return "\n".join(lines) + "\n"


def _default(f: Field[Any]) -> str:
    if f.default is not MISSING:
        return f"`{f.default!r}`"
    return "empty" if f.default_factory is not MISSING else ""


def _errors() -> str:
    lines = ["| error | gRPC, HTTP | meaning |", "|---|---|---|"]
    for cls, (grpc, http) in errors.STATUS.items():
        depth = sum(issubclass(cls, other) for other in errors.STATUS) - 1
        lines.append(f"| {'&emsp;' * depth}`{cls.__name__}` | {grpc}, {http} | {_first(cls)} |")
    return "\n".join(lines) + "\n"


def _signature(name: str, of: Any) -> str:
    text = (
        str(inspect.signature(of)).replace("'", "").replace("(self, ", "(").replace("(self)", "()")
    )
    text = text.replace("(self, /, ", "(").replace("(/, ", "(")
    wrapped = textwrap.fill(name + text, 110, subsequent_indent="    ", break_on_hyphens=False)
    return f"```text\n{wrapped}\n```\n"


def _text(of: Any) -> str:
    doc = inspect.getdoc(of) or ""
    return _marked(doc) + "\n"


def _first(of: Any) -> str:
    """The first sentence of a docstring."""
    text = " ".join(_marked(inspect.getdoc(of) or "").split())
    return re.split(r"(?<=[^.])\.(?:\s|$)", text, maxsplit=1)[0] + "."


def _marked(doc: str) -> str:
    return doc.replace("``", "`")


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        return int(text != PAGE.read_text())
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
