"""From a directory or a hub id to a directory that holds the checkpoint."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from rollout.errors import ConfigError
from rollout.loader.modelscope import SCHEME, fetch_modelscope
from rollout.loader.remote import SIDE_FILES, fetch_side_files, is_remote
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
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def resolve_model(
    model: str,
    revision: str | None = None,
    load_format: str = "auto",
    token: str | None = None,
) -> Path:
    """A local directory as it is; a hub id from the cache, else downloaded into it, and so a model
    of ModelScope (``modelscope://owner/name``); of another URL, one with all but the weights.

    Only the files ``load_format`` needs are fetched; ``auto`` fetches .bin files when there are no
    safetensors. huggingface_hub's own locks let several ranks call this at once.
    """
    kinds = _KINDS.get(load_format, (SAFETENSORS, PT))
    if model.startswith(SCHEME):
        return fetch_modelscope(model, revision, kinds)
    if is_remote(model):
        return fetch_side_files(model)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} holds no config.json; is it a checkpoint directory?")
        return path
    if path.exists():
        raise ConfigError(f"{path} is a file; give the directory it lies in")
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"{model!r} is no directory here and no hub id; check the path")
    for local in (True, False):
        for kind in kinds:
            found = _snapshot(model, revision, kind, token, local=local)
            if found is not None:
                return found
    raise ConfigError(f"{model}: the hub has no weights for load_format={load_format!r}")


def _snapshot(
    model: str, revision: str | None, kind: FileKind | None, token: str | None, *, local: bool
) -> Path | None:
    """The snapshot with its weights of ``kind`` (None: without weights), else None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*SIDE_FILES, *(kind.patterns if kind else ())]
    try:
        found = snapshot_download(
            model,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=["consolidated*"],
            token=token,
            local_files_only=local,
        )
    except LocalEntryNotFoundError as error:
        if local:
            return None
        raise ConfigError(
            f"{model}: no such directory, not in the hub cache (revision {revision or 'main'}), "
            "and the hub cannot be reached; check the path, or download it first"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(
            f"{model} cannot be downloaded ({error}); check the id and revision, and for a gated "
            "model pass a token (HF_TOKEN)"
        ) from error
    # A cache may hold a tokenizer's files alone, or an index without all of its shards.
    try:
        path = Path(found)
        has_weights = kind is None or find_shards(path, kind).files
        return path if has_weights and (path / "config.json").is_file() else None
    except ConfigError:
        if local:
            return None
        raise


def copy_side_files(source: Path, target: Path) -> None:
    """All of a checkpoint but its weights and what indexes them."""
    if source.resolve() == target.resolve():
        return
    for path in source.iterdir():
        named = any(fnmatch(path.name, pattern) for pattern in SIDE_FILES)
        if named and path.is_file() and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
