"""Flags as vLLM and SGLang spell them: the ones that mean what one of ours means, and the others.

A flag that is in neither list is unknown, and argparse says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    "-q": ("--quantization",),
    "--api-key": ("--token",),
    "--ssl-certfile": ("--tls-cert",),
    "--ssl-keyfile": ("--tls-key",),
    "--ssl-ca-certs": ("--tls-client-ca",),
}
_SHORT = {"-pp": "pipeline_parallel_size", "-dp": "data_parallel_size"}
REFUSED: Mapping[str, str] = {
    flag: ENGINE.why_refused(name, as_flag) or ""
    for flag, name in [*((as_flag(name), name) for name in ENGINE.refused), *_SHORT.items()]
    if flag not in ("--logprobs-mode", "--lora-modules")  # of `serve` they are
}


def respelled(argv: Sequence[str]) -> list[str]:
    """``argv`` in our spelling; raises ``ConfigError`` for a flag that has no meaning here."""
    command = next((word for word in argv if not word.startswith("-")), None)
    if command not in COMMANDS:
        return list(argv)
    found: list[str] = []
    for index, word in enumerate(argv):
        if word == "--":
            return [*found, *argv[index:]]
        flag, equals, value = word.partition("=")
        if word.startswith("-") and flag in REFUSED:
            raise ConfigError(f"{flag} is not a flag of rollout {command}: {REFUSED[flag]}")
        ours = SAME.get(flag, (flag,))
        found += [*ours[:-1], f"{ours[-1]}={value}"] if equals else ours
    return found
