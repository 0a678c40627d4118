"""Command-line flags made from ``EngineConfig`` and ``SamplingParams``: one flag a field."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from rollout.cli.spellings import respelled
from rollout.config import EngineConfig
from rollout.errors import ConfigError
from rollout.generation import SamplingParams
from rollout.wire.spellings import SAMPLING, as_flag, near

ENGINE_FLAGS = tuple(f for f in fields(EngineConfig) if f.name != "model")
SAMPLING_FLAGS = tuple(
    f
    for f in fields(SamplingParams)
    if f.metadata["served"] and f.name not in ("logit_bias", "structured_outputs", "routed_experts")
)
# Flag, what follows it (a name: N is an integer, X a float; what may follow it; "" nothing),
# default, help.
Row = tuple[str, str | tuple[str, ...], Any, str]
_FLAG = re.compile(r"--[A-Za-z][\w-]*|-[a-z]{1,2}")  # other words that begin with - are prompts
_BEHIND = "a prompt that begins with - goes behind --, the last of all flags: --"
TOKEN: Row = ("--token", "TOKEN", None, "bearer token of the service")


class Parser(argparse.ArgumentParser):
    """Raises ``ConfigError`` instead of printing usage and exiting; names the nearest flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        known = action.choices if isinstance(action, argparse._SubParsersAction) else (value,)
        if value not in known and (meant := near(value, known)):
            raise argparse.ArgumentError(action, f"no {value!r}; did you mean {meant!r}?")
        super()._check_value(action, value)

    def parse_known(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse everything; ``words`` may stand before, between and after flags.

        Flags may be spelled as vLLM and SGLang have them. What is left over is a mistake.
        """
        args, rest = self.parse_known_args(respelled(sys.argv[1:] if argv is None else argv))
        if hasattr(args, "words"):
            rest = _take_words(args.words, rest)
        if rest:
            flag = rest[0].partition("=")[0]
            if hasattr(args, "words") and not _FLAG.fullmatch(flag):
                raise ConfigError(f"unknown argument {rest[0]}; {_BEHIND} {rest[0]!r}")
            raise ConfigError(self._unknown(args.parser, flag))
        return args

    def _unknown(self, command: argparse.ArgumentParser, word: str) -> str:
        """What is wrong with ``word``: meant for another command, misspelt, or neither."""
        if not word.startswith("-"):
            return f"{word!r} is one argument too many; see `{command.prog} --help`"
        if owners := self._owners(word):
            return f"{word} is a flag of {owners}, not of `{command.prog}`"
        theirs = {
            as_flag(name): as_flag(ours)
            for name, ours in SAMPLING.same.items()
            if isinstance(ours, str) and as_flag(ours) in command._option_string_actions
        }
        if word in theirs:
            return f"unknown argument {word}; here it is {theirs[word]}"
        if why := _has_no_flag(command, word):
            return f"unknown argument {word}; {why}"
        if meant := near(word, sorted({*command._option_string_actions, *theirs})):
            return f"unknown argument {word}; did you mean {theirs.get(meant, meant)}?"
        others = {flag for p in subparsers(self) for flag in p._option_string_actions}
        if meant := near(word, sorted(others)):
            owners = self._owners(meant)
            return f"unknown argument {word}; did you mean {meant}? It is a flag of {owners}"
        return f"unknown argument {word}; see `{command.prog} --help`"

    def _owners(self, flag: str) -> str:
        """The commands that have it; "" where none has."""
        having = [f"`{p.prog}`" for p in subparsers(self) if flag in p._option_string_actions]
        return ", ".join(having)


def _has_no_flag(command: argparse.ArgumentParser, word: str) -> str:
    """What to do for a sampling parameter that has no flag, where others have one; else ""."""
    name = word.lstrip("-").replace("-", "_")
    name = str(SAMPLING.same.get(name, name))
    others = {f.name for f in fields(SamplingParams)} - {f.name for f in SAMPLING_FLAGS}
    if name not in others or "--temperature" not in command._option_string_actions:
        return ""
    shown = "--json shows those of the sampled tokens; " if name == "logprobs" else ""
    return f"{shown}in Python it is SamplingParams({name}=...)"


def _take_words(words: list[str], rest: list[str]) -> list[str]:
    """Move what ``rest`` begins with, up to a flag, into ``words``; argparse stops at one run."""
    for index, word in enumerate(rest):
        if word == "--":
            words += rest[index + 1 :]
            return []
        if word.startswith("-"):
            return rest[index:]
        words.append(word)
    return []


def subparsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    return [
        child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for child in action.choices.values()
    ]


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, which may also be given as ``--model MODEL``; see ``model_of``."""
    text = "checkpoint directory, hub id or URL"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    add_model_flag(parser)


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the model, as a flag")


def model_of(args: argparse.Namespace) -> str:
    """The model; raises ``ConfigError`` where it is missing, or given twice."""
    if args.model is not None and args.model_flag is not None:
        raise ConfigError(f"the model is given twice: {args.model} and --model {args.model_flag}")
    model: str | None = args.model if args.model is not None else args.model_flag
    if model is None:
        raise ConfigError(
            f"which MODEL? Give a checkpoint directory or hub id: `{args.parser.prog} MODEL`"
        )
    return model


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    _add_flags(group, EngineConfig, ENGINE_FLAGS)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    _add_flags(group, SamplingParams, SAMPLING_FLAGS, "sampling_")


def engine_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The settings that were given on the command line, over ``defaults``."""
    return EngineConfig.from_dict({**defaults, **_given(args, ENGINE_FLAGS)})


def engine_flags(config: EngineConfig) -> list[str]:
    """The command line that makes these settings, the model aside."""
    words: list[str] = []
    hints = get_type_hints(EngineConfig)
    for f in ENGINE_FLAGS:
        value = getattr(config, f.name)
        name = "--" + f.name.replace("_", "-")
        if value == (f.default if f.default_factory is MISSING else f.default_factory()):
            continue
        if isinstance(value, bool):
            words.append(name if value else name.replace("--", "--no-", 1))
        elif _kind(hints[f.name]).get("type") is _json_object:
            words += [name, json.dumps(value)]
        elif isinstance(value, tuple | Mapping):
            each = [f"{k}={v}" for k, v in value.items()] if isinstance(value, Mapping) else value
            words += [word for one in each for word in (name.removesuffix("s"), str(one))]
        else:
            words += [name, str(value)]
    return words


def refuse_engine_flags(args: argparse.Namespace, beside: str, but: Sequence[str] = ()) -> None:
    """``ConfigError`` for settings of an engine, or a model, where the engine is a service's; those
    in ``but`` are of use there.
    """
    names = [f.name for f in ENGINE_FLAGS if hasattr(args, f.name) and f.name not in but]
    given = [as_flag(name) for name in names]
    given += ["--model"] if args.model_flag is not None else []
    if given:
        own = [as_flag(f"sampling_{name}") for name in names]
        own = [flag for flag in own if flag in args.parser._option_string_actions]
        raise ConfigError(
            f"{', '.join(given)}: a setting of the engine, which the service has chosen at its "
            f"start; leave it out beside {beside}"
            + (f", or give {', '.join(own)}, of the request" if own else "")
        )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams.from_dict(_given(args, SAMPLING_FLAGS, "sampling_"))


def _given(
    args: argparse.Namespace, flags: Sequence[Field[Any]], prefix: str = ""
) -> dict[str, Any]:
    """The values of the flags that are there; a list of ``none`` alone is none."""
    given = {
        f.name: getattr(args, prefix + f.name) for f in flags if hasattr(args, prefix + f.name)
    }
    return {name: None if value == [None] else value for name, value in given.items()}


def _add_flags(group: Any, cls: type[Any], flags: Sequence[Field[Any]], prefix: str = "") -> None:
    """A flag for each of these fields of ``cls``; an absent flag sets nothing."""
    hints = get_type_hints(cls)
    for f in flags:
        options = _kind(hints[f.name])
        if type(None) in get_args(hints[f.name]) and "none" in f.metadata["help"]:
            options["type"] = _or_none(options.get("type", str))
        options |= {"metavar": f.metadata["metavar"]} if f.metadata.get("metavar") else {}
        name = f.name.removesuffix("s") if options.get("action") in ("append", _Pairs) else f.name
        if prefix and any(f.name == engines.name for engines in ENGINE_FLAGS):
            name = prefix + name  # the engine has one, too
        text = f.metadata["help"].replace("%", "%%")
        group.add_argument(
            "--" + name.replace("_", "-"),
            dest=prefix + f.name,
            default=argparse.SUPPRESS,
            help=text + _default_note(f.default, text),
            **options,
        )


def add_rows(group: Any, rows: Iterable[Row]) -> None:
    """A flag for each row of a table."""
    for name, value, default, text in rows:
        options: dict[str, Any] = {}
        if isinstance(value, tuple):
            options = {"choices": value, "type": str.lower}  # INFO is info
        elif value == "":
            options["action"] = "store_true"
        else:
            options |= {"type": {"N": int, "X": float}.get(value, str), "metavar": value}
        note = "" if value == "" else _default_note(default, text)
        text = text.replace("%", "%%") + note
        group.add_argument(name, default=default, help=text, **options)


def attribute(flag: str) -> str:
    """Where argparse keeps it."""
    return flag.removeprefix("--").replace("-", "_")


def given_of(args: argparse.Namespace, rows: Iterable[Row]) -> list[str]:
    """The flags of these rows that say something other than their default."""
    return [
        name
        for name, _, default, _ in rows
        if getattr(args, attribute(name)) not in (default, None)
    ]


def refuse(args: argparse.Namespace, rows: Iterable[Row], why: str) -> None:
    """``ConfigError`` where flags are given that have no meaning here."""
    if given := given_of(args, rows):
        raise ConfigError(f"{', '.join(given)}: {why}")


def _kind(hint: Any) -> dict[str, Any]:
    """argparse's words for a field's type."""
    plain = [hint]
    if isinstance(hint, UnionType):
        plain = [kind for kind in get_args(hint) if kind is not type(None)]
    if plain[0] is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(plain[0]) is Mapping and get_args(plain[0])[1] is Any:
        return {"type": _json_object, "metavar": "JSON"}
    if get_origin(plain[0]) is Mapping:
        return {"action": _Pairs, "metavar": "NAME=VALUE"}
    if get_args(plain[0]):  # a tuple
        item = get_args(plain[0])[0]
        return {"action": "append", "type": item, "metavar": "N" if item is int else "TEXT"}
    if plain[0] is int:
        return {"type": int, "metavar": "N"}
    if plain[0] is float:
        return {"type": float, "metavar": "X"}
    return {"metavar": "NAME"}


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """``read``, or None of the word none, which such a flag's help names."""

    def or_none(text: str) -> Any:
        return None if text.lower() == "none" else read(text)

    or_none.__name__ = read.__name__  # what argparse calls an invalid value
    return or_none


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.200} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.200} is no JSON object")
    return found


class _Pairs(argparse.Action):
    """``--flag NAME=VALUE``, which may be repeated, as one dict."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: Any = None) -> None:
        name, mark, text = value.partition("=")
        if not mark:
            raise ConfigError(f"{option} takes {self.metavar}, got {value!r}")
        held = getattr(namespace, self.dest, {})
        if name in held:
            raise ConfigError(f"{option} {name} is given twice")
        setattr(namespace, self.dest, {**held, name: text})


def _default_note(default: Any, text: str) -> str:
    if default in (None, MISSING, (), "auto", "") or "default" in text:
        return ""
    if isinstance(default, bool):
        return f" (default: {'on' if default else 'off'})"
    return f" (default: {default})"


def token_of(args: argparse.Namespace) -> str | None:
    """``--token``, else ROLLOUT_TOKEN; an empty one is a mistake, never "no token"."""
    token: str | None = args.token if args.token is not None else environment("TOKEN")
    if token is not None and not token.strip():
        raise ConfigError("--token is empty: give it a value, or leave it out")
    return token


def environment(name: str) -> str | None:
    """The one place where the command line reads the environment."""
    value = os.environ.get(f"ROLLOUT_{name}")
    if value is not None and not value.strip():
        raise ConfigError(f"ROLLOUT_{name} is set but empty: give it a value, or unset it")
    return value
