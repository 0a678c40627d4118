"""The weights in a directory: of ranks' own files, safetensors, or .bin and .pt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollout.loader.sharded_state import ShardedFiles, is_sharded, rank_files
from rollout.weights.files import Files, open_weights, weight_shards


def found_format(directory: Path) -> str:
    """The ``load_format`` of what lies there: ``sharded_state``, ``safetensors`` or ``pt``."""
    return "sharded_state" if is_sharded(directory) else weight_shards(directory)[0].name


def weight_paths(directory: Path, load_format: str) -> Sequence[Path]:
    """The files that one of these formats reads. Raises ``ConfigError`` where one is missing."""
    if load_format == "sharded_state":
        return rank_files(directory)
    return weight_shards(directory, load_format)[1].files


def open_files(directory: Path, load_format: str, *, mapped: bool = True) -> Files:
    """Those files, opened; ``mapped`` is for files that nobody writes meanwhile."""
    if load_format == "sharded_state":
        return ShardedFiles(directory, mapped=mapped)
    return open_weights(directory, load_format, mapped=mapped)[1]
