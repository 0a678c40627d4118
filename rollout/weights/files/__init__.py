"""The files of a directory that hold its weights, and boxes of the tensors in them.

One resolver for whoever reads a checkpoint: a cold start, an update from a directory, a check
against one, and ``--follow``. It knows nothing of models and engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights import Box, TensorMeta
from rollout.weights.files.mxfp4 import Mxfp4Files, is_packed
from rollout.weights.files.packed_int import PackedIntFiles, is_packed_int
from rollout.weights.files.safetensors_files import SafetensorsFiles
from rollout.weights.files.scaled import ScaledFiles, has_codes
from rollout.weights.files.shards import (
    PT,
    SAFETENSORS,
    AsTheyWere,
    FileKind,
    Shards,
    Written,
    find_shards,
    weight_files,
    why_none,
    why_unwritten,
)
from rollout.weights.files.torch_files import TorchFiles
from rollout.weights.packed_rows import FileCodes

KINDS = (SAFETENSORS, PT)  # in the order in which they are looked for


class Files(Protocol):
    """One format: what tensors there are, and reads of boxes of them."""

    def metadata(self) -> Mapping[str, TensorMeta]: ...

    def read(self, name: str, box: Box) -> Tensor: ...

    def close(self) -> None: ...


def weight_shards(directory: Path, load_format: str = "auto") -> tuple[FileKind, Shards]:
    """Which files hold the weights; ``load_format`` auto (safetensors, else .bin/.pt) or a kind's.

    Raises ``ConfigError`` where there is none, or an index is broken or names a missing file.
    """
    kinds = [kind for kind in KINDS if load_format in ("auto", kind.name)]
    for kind in kinds:
        shards = find_shards(directory, kind)
        if shards.files:
            return kind, shards
    wanted = " or ".join(pattern for kind in kinds for pattern in kind.patterns)
    remedy = why_none(directory) or "; check the path, or choose another load_format"
    raise ConfigError(f"{directory} holds no {wanted} weights{remedy}")


def open_weights(
    directory: Path, load_format: str = "auto", *, mapped: bool = True
) -> tuple[FileKind, Files]:
    """The weights of a directory, opened; every header is checked. Raises ``ConfigError``.

    Experts in mxfp4 are read as bfloat16, linears in fp8 or int8, or packed in int32 (GPTQ, AWQ,
    compressed-tensors), as float32, times their scales. ``mapped`` is for files that nobody writes
    meanwhile.
    """
    kind, shards = weight_shards(directory, load_format)
    form = SafetensorsFiles if kind is SAFETENSORS else TorchFiles
    return kind, unpacked(form(shards, mapped=mapped), directory)


def codes_of(files: Files, name: str) -> tuple[FileCodes, ...]:
    """The codes that the files have of a quantised weight, by scheme; none of others. Those of
    experts in one tensor are read one expert at a time."""
    return files.codes(name) if isinstance(files, ScaledFiles | Mxfp4Files) else ()


def unpacked(files: Files, directory: Path) -> Files:
    """``files`` as what their packed tensors stand for; ``directory`` holds the ``config.json``."""
    try:
        if is_packed_int(files.metadata()):
            files = PackedIntFiles(files, directory)
        if has_codes(files.metadata()):
            files = ScaledFiles(files, directory)
        return Mxfp4Files(files) if is_packed(files.metadata()) else files
    except ConfigError:
        files.close()
        raise


__all__ = [
    "KINDS",
    "PT",
    "SAFETENSORS",
    "AsTheyWere",
    "FileKind",
    "Files",
    "Shards",
    "TorchFiles",
    "Written",
    "codes_of",
    "find_shards",
    "open_weights",
    "unpacked",
    "weight_files",
    "weight_shards",
    "why_none",
    "why_unwritten",
]
