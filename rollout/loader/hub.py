"""From a directory or a hub id to a directory that holds the checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError
from rollout.loader.modelscope import SCHEME, fetch_modelscope
from rollout.loader.remote import SIDE_FILES, TEMPLATES, fetch_side_files, is_remote
from rollout.weights.files import (
    PT,
    SAFETENSORS,
    FileKind,
    find_shards,
)

_KINDS: Mapping[str, tuple[FileKind | None, ...]] = {
    **dict.fromkeys(("safetensors", "fastsafetensors"), (SAFETENSORS,)),
    "pt": (PT,),
    "dummy": (None,),
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def resolve_model(
    model: str,
    revision: str | None = None,
    load_format: str = "auto",
    token: str | None = None,
    *,
    code: bool = False,
) -> Path:
    """A local directory as it is; a hub id from the cache, else downloaded into it, and so a model
    of ModelScope (``modelscope://owner/name``); of another URL, one with all but the weights.

    Only the files ``load_format`` needs are fetched; ``auto`` fetches .bin files when there are no
    safetensors. ``code``: code that lies with the model is needed, too, where there is some.
    huggingface_hub's own locks let several ranks call this at once.
    """
    kinds = _KINDS.get(load_format, (SAFETENSORS, PT))
    if (found := _not_of_the_hub(model, revision, kinds, "revision")) is not None:
        if not (found / "config.json").is_file():
            if (found / "adapter_config.json").is_file():
                raise ConfigError(
                    f"{found} is an adapter, not a model: start its base model, with "
                    "max_adapters=1 or more to serve it unmerged, and load it by "
                    "load_lora_adapter, or by `rollout serve --max-adapters 1 --lora-modules "
                    f"NAME={found}`"
                )
            raise ConfigError(f"{found} holds no config.json; is it a checkpoint directory?")
        return found
    for local in (True, False):
        for kind in kinds:
            path = _snapshot(model, revision, kind, token, local=local)
            if path is not None and not (local and code and _lacks_code(path)):
                return path
    raise ConfigError(f"{model}: the hub has no weights for load_format={load_format!r}")


def resolve_component(path: str) -> Path:
    """What is held beside a model: a directory, with or without a config, or a hub id."""
    directory = Path(path).expanduser()
    return directory if os.path.isdir(directory) else resolve_model(path)


def resolve_tokenizer(tokenizer: str, revision: str | None = None, *, code: bool = False) -> Path:
    """The directory of a tokenizer that is named as a model is; of a hub id, without weights.

    ``ConfigError`` where there is none.
    """
    path = _not_of_the_hub(tokenizer, revision, (None,), "tokenizer_revision")
    if path is None:
        path = _fetched(tokenizer, revision, SIDE_FILES, None, local=True)
        if path is None or not has_tokenizer(path) or (code and _lacks_code(path)):
            path = _fetched(tokenizer, revision, SIDE_FILES, None, local=False)
    if path is None or not has_tokenizer(path):
        raise ConfigError(
            f"{tokenizer} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}; check tokenizer "
            "and tokenizer_revision"
        )
    return path


def has_tokenizer(directory: Path) -> bool:
    """Whether files of a tokenizer are there."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def _not_of_the_hub(
    where: str, revision: str | None, kinds: Iterable[FileKind | None], setting: str
) -> Path | None:
    """Where a directory or URL lies here; None for a hub id."""
    if where.startswith(SCHEME):
        return fetch_modelscope(where, revision, kinds)
    path = Path(where).expanduser()
    remote = is_remote(where)
    there = os.path.exists(path)  # pathlib raises where a name is too long to be one
    if revision is not None and (remote or there):
        raise ConfigError(
            f"{setting}={revision!r} is of a hub id, and {where} is a "
            f"{'URL' if remote else 'directory'}: leave it out"
        )
    if remote:
        return fetch_side_files(where)
    if there and path.is_dir():
        return path
    if there:
        raise ConfigError(f"{path} is a file; give the directory it lies in")
    if not _HUB_ID.fullmatch(where):
        address = re.fullmatch(r"\S+:\d+", where) is not None
        remedy = "to use a service at an address: Rollout.connect" if address else "check the path"
        raise ConfigError(f"{where!r:.300} is no directory here and no hub id; {remedy}")
    return None


def _snapshot(
    model: str, revision: str | None, kind: FileKind | None, token: str | None, *, local: bool
) -> Path | None:
    """The snapshot with its weights of ``kind`` (None: without weights), else None."""
    patterns = [*SIDE_FILES, *(kind.patterns if kind else ())]
    path = _fetched(model, revision, patterns, token, local=local)
    if path is None:
        return None
    # A cache may hold a tokenizer's files alone, or an index without all of its shards.
    try:
        has_weights = kind is None or find_shards(path, kind).files
        return path if has_weights and (path / "config.json").is_file() else None
    except ConfigError:
        if local:
            return None
        raise


def _fetched(
    name: str, revision: str | None, patterns: Sequence[str], token: str | None, *, local: bool
) -> Path | None:
    """The snapshot of a hub id with its files of these names; None where the cache has none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name,
            revision=revision,
            allow_patterns=[*patterns],
            ignore_patterns=["consolidated*"],
            token=token,
            local_files_only=local,
        )
    except LocalEntryNotFoundError as error:
        if local:
            return None
        raise ConfigError(
            f"{name}: no such directory, not in the hub cache (revision {revision or 'main'}), "
            "and the hub cannot be reached; check the path, or download it first"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(
            f"{name} cannot be downloaded ({error}); check the id and revision, and for a gated "
            "model pass a token (HF_TOKEN)"
        ) from error
    return Path(found)


def _lacks_code(directory: Path) -> bool:
    """Whether configs name code as their own that is not there: others fetch without it."""
    named: list[Any] = []
    for file in (directory / "config.json", directory / "tokenizer_config.json"):
        try:
            values = json.loads(file.read_text(encoding="utf-8")).get("auto_map") or {}
        except (OSError, ValueError, AttributeError):
            continue  # whoever reads it says what is wrong
        for value in values.values() if isinstance(values, dict) else ():
            named += value if isinstance(value, list) else [value]
    own = (n.partition(".")[0] for n in named if isinstance(n, str) and "--" not in n)
    return not all((directory / f"{module}.py").is_file() for module in own)


def copy_side_files(source: Path, target: Path) -> None:
    """All of a checkpoint but its weights and what indexes them."""
    if source.resolve() == target.resolve():
        return
    for path in (*source.iterdir(), *source.glob(f"{TEMPLATES}/*")):
        named = any(fnmatch(path.name, pattern) for pattern in SIDE_FILES)
        if named and path.is_file() and not path.name.endswith(".index.json"):
            into = target / path.relative_to(source)
            into.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, into)
