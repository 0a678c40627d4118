"""Flags as vLLM and SGLang spell them: the ones that mean what one of ours means, and the others.

A flag that is in no list is unknown, and argparse says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rollout.config import EngineConfig
from rollout.errors import ConfigError
from rollout.wire.spellings import ENGINE, as_flag

COMMANDS = ("serve", "generate", "check", "bench", "fleet")  # those that take theirs


def _words(ours: str | tuple[str, Any]) -> tuple[str, ...]:
    """The command line that sets one of ours."""
    if isinstance(ours, str):
        return (as_flag(ours),)
    name, value = ours
    if isinstance(value, bool):
        return (as_flag(name if value else f"no_{name}"),)
    return (as_flag(name), str(value))


# Theirs -> ours; a value that follows stays where it is.
SAME: Mapping[str, tuple[str, ...]] = {
    **{as_flag(theirs): _words(ours) for theirs, ours in ENGINE.same.items()},
    "-tp": ("--tensor-parallel-size",),
    "-pp": ("--pipeline-parallel-size",),
    "-q": ("--quantization",),
    "--api-key": ("--token",),
    "--ssl-certfile": ("--tls-cert",),
    "--ssl-keyfile": ("--tls-key",),
    "--ssl-ca-certs": ("--tls-client-ca",),
}
_LISTS = frozenset(f.name for f in fields(EngineConfig) if f.default == ())
_FLAG = re.compile(r"--[A-Za-z][\w-]*")


def _flag(name: str) -> str:
    """The flag of a setting; of a list it adds one."""
    return as_flag(name.removesuffix("s") if name in _LISTS else name)


_SHORT = {"-dp": "data_parallel_size"}
REFUSED: Mapping[str, str] = {
    flag: ENGINE.why_refused(name, _flag) or ""
    for flag, name in [*((as_flag(name), name) for name in ENGINE.refused), *_SHORT.items()]
    if flag not in ("--logprobs-mode", "--lora-modules")  # of `serve` they are
}
# Theirs, refused but with these values: what they mean is so here, or one of ours.
BY_VALUE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "--generation-config": {"vllm": ()},
    "--distributed-executor-backend": {
        "mp": ("--executor", "multiprocess"),
        "ray": ("--executor", "ray"),
        "uni": ("--executor", "inline"),
    },
}


def respelled(argv: Sequence[str]) -> list[str]:
    """``argv`` in our spelling; raises ``ConfigError`` for a flag that has no meaning here."""
    command = next((word for word in argv if not word.startswith("-")), None)
    found: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            return [*found, word, *words]
        flag, equals, value = word.partition("=")
        if _FLAG.fullmatch(flag):
            flag = flag.replace("_", "-")
        if command not in COMMANDS:
            found.append(flag + equals + value)
            continue
        if flag in BY_VALUE:
            value = value if equals else next(words, "")
            if value in BY_VALUE[flag]:
                found += BY_VALUE[flag][value]
                continue
        if word.startswith("-") and flag in REFUSED:
            raise ConfigError(f"{flag} is not a flag of rollout {command}: {REFUSED[flag]}")
        ours = SAME.get(flag, (flag,))
        found += [*ours[:-1], f"{ours[-1]}={value}"] if equals else ours
    return found
