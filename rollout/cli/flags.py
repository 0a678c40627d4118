"""Command-line flags made from ``EngineConfig`` and ``SamplingParams``: one flag a field."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NoReturn, get_args, get_type_hints

from rollout.cli.spellings import respelled
from rollout.config import EngineConfig
from rollout.errors import ConfigError
from rollout.generation import SamplingParams

ENGINE_HELP: Mapping[str, str] = {
    "revision": "branch, tag or commit of a hub id",
    "tokenizer": "directory or hub id of the tokenizer (default: the model's)",
    "skip_tokenizer_init": "serve token ids only",
    "served_model_name": "name that clients ask for (default: MODEL as given)",
    "device": "auto, cpu or cuda",
    "dtype": "auto (the checkpoint's), float32, bfloat16 or float16",
    "load_format": "auto, safetensors, pt, or dummy (made-up weights)",
    "executor": "auto, inline (one rank, in this process) or multiprocess",
    "tensor_parallel_size": "ranks that share the model",
    "expert_parallel": "ranks hold whole experts instead of a part of each",
    "max_model_len": "longest sequence in tokens (default: the model's own, if it fits)",
    "max_num_seqs": "sequences that run at the same time",
    "max_num_batched_tokens": "tokens of one engine step",
    "max_queued_requests": "sequences that may wait; a call beyond it is refused (HTTP 429)",
    "block_size": "tokens of one KV block",
    "num_kv_blocks": "KV blocks of each rank (default: by memory)",
    "kv_cache_bytes": "bytes of KV cache of each rank (default: by memory)",
    "enable_prefix_caching": "share the KV blocks of common prefixes",
    "staging": "where an update waits for its commit: auto, device, host or none",
    "undo": "what a rollback needs is kept as: shadow (until the next update), sparse or host",
    "weight_layout": "how linear weights lie in memory: auto, plain or tiles",
    "deterministic": "the same bits for a sequence in any batch, cached, cut or preempted",
    "head_dtype": "of the logits: auto (the model's) or float32",
    "seed": "of requests that bring none (default: another at every start)",
    "num_threads": "CPU threads of each rank (default: cores / ranks)",
    "timeout": "seconds that a wait may take",
    "start_timeout": "seconds that loading may take",
    "weight_dirs": "directory under which the server may read updates itself (--follow, "
    "server_path=); may be repeated",
    "cuda_graphs": "capture decode steps on a GPU: auto, on or off",
    "cuda_graph_sizes": "batch size to capture; may be repeated (default: some up to the most)",
    "async_scheduling": "give the ranks step N+1 while N runs",
    "check_finite": "refuse updates whose weights hold NaN or infinity (default: on)",
    "progress": "draw a bar while weights are read",
}
SAMPLING_HELP: Mapping[str, str] = {
    "n": "samples of each prompt",
    "temperature": "of sampling; 0 is greedy",
    "top_p": "keep the likeliest tokens up to this mass",
    "top_k": "keep this many of the likeliest tokens; 0: all",
    "min_p": "keep tokens at least this likely, relative to the likeliest",
    "seed": "makes the samples repeatable",
    "max_tokens": "longest answer in tokens",
    "min_tokens": "shortest answer in tokens",
    "ignore_eos": "go on after the end-of-sequence token",
}


class Parser(argparse.ArgumentParser):
    """Raises ``ConfigError`` instead of printing usage and exiting; names the nearest flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def parse_known(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse everything; ``words`` may stand before, between and after flags.

        Flags may be spelled as vLLM and SGLang have them. What is left over is a mistake.
        """
        args, rest = self.parse_known_args(respelled(sys.argv[1:] if argv is None else argv))
        if hasattr(args, "words"):
            rest = _take_words(args.words, rest)
        if rest:
            raise ConfigError(self._unknown(args.parser, rest[0].partition("=")[0]))
        return args

    def _unknown(self, command: argparse.ArgumentParser, word: str) -> str:
        """What is wrong with ``word``: meant for another command, misspelt, or neither."""
        if not word.startswith("-"):
            return f"{word!r} is one argument too many; see `{command.prog} --help`"
        owners = [p.prog for p in _subparsers(self) if word in p._option_string_actions]
        if owners:
            return f"{word} is a flag of `{'`, `'.join(owners)}`, not of `{command.prog}`"
        near = difflib.get_close_matches(word, sorted(command._option_string_actions), 1)
        hint = f"did you mean {near[0]}?" if near else f"see `{command.prog} --help`"
        return f"unknown argument {word}; {hint}"


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


def all_flags(parser: argparse.ArgumentParser) -> set[str]:
    """Every option string of a parser and its subcommands."""
    return {f for p in (parser, *_subparsers(parser)) for f in p._option_string_actions}


def _subparsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    return [
        child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for child in action.choices.values()
    ]


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, which may also be given as ``--model MODEL``; see ``model_of``."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="checkpoint directory or hub id")
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
    _add_flags(group, EngineConfig, ENGINE_HELP)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    _add_flags(group, SamplingParams, SAMPLING_HELP)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS,
        help="end an answer before this text; may be repeated",
    )  # fmt: skip


def engine_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The settings that were given on the command line, over ``defaults``."""
    given = {name: getattr(args, name) for name in ENGINE_HELP if hasattr(args, name)}
    return EngineConfig.from_dict({**defaults, **given})


def refuse_engine_flags(args: argparse.Namespace, beside: str) -> None:
    """``ConfigError`` for settings of an engine, or a model, where the engine is a service's."""
    given = [f"--{name.replace('_', '-')}" for name in ENGINE_HELP if hasattr(args, name)]
    given += ["--model"] if args.model_flag is not None else []
    if given:
        raise ConfigError(
            f"{', '.join(given)}: a setting of the engine, which the service has chosen at its "
            f"start; leave it out beside {beside}"
        )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    names = (*SAMPLING_HELP, "stop")
    given = {name: getattr(args, f"sampling_{name}", None) for name in SAMPLING_HELP}
    given["stop"] = getattr(args, "stop", None)
    return SamplingParams.from_dict({n: given[n] for n in names if given[n] is not None})


def _add_flags(group: Any, cls: type[Any], help_texts: Mapping[str, str]) -> None:
    """One flag for each field that ``help_texts`` names; an absent flag sets nothing."""
    hints = get_type_hints(cls)
    prefix = "sampling_" if cls is SamplingParams else ""
    for f in fields(cls):
        if f.name not in help_texts:
            continue
        repeated = f.name in ("weight_dirs", "cuda_graph_sizes")
        flag = "--" + f.name.removesuffix("s" if repeated else "").replace("_", "-")
        if cls is SamplingParams and f.name == "seed":
            flag = "--sampling-seed"
        options: dict[str, Any] = {
            "dest": prefix + f.name,
            "default": argparse.SUPPRESS,
            "help": help_texts[f.name] + _default_note(f.default, help_texts[f.name]),
        }
        group.add_argument(flag, **options, **_kind(hints[f.name]))


def _kind(hint: Any) -> dict[str, Any]:
    """argparse's words for a field's type."""
    plain = [t for t in get_args(hint) if t is not type(None)] or [hint]
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if hint == tuple[int, ...]:
        return {"action": "append", "type": int, "metavar": "N"}
    if plain[0] is int:
        return {"type": int, "metavar": "N"}
    if plain[0] is float:
        return {"type": float, "metavar": "X"}
    if plain[0] is str and hint != tuple[str, ...]:
        return {"metavar": "NAME"}
    return {"action": "append", "metavar": "DIR"}


def _default_note(default: Any, text: str) -> str:
    if default in (None, MISSING, (), "auto") or isinstance(default, bool) or "default" in text:
        return ""
    return f" (default: {default})"


def add_token(parser: Any, text: str) -> None:
    parser.add_argument("--token", metavar="TOKEN", help=text)


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
