"""Which files of a directory hold its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from rollout.errors import ConfigError, some

_NO_WEIGHTS = ("training_args*", "optimizer*", "scheduler*", "rng_state*", "trainer_state*")
# What trainers write to go on from, and where whole weights come from.
_RANKS_OWN = (
    ("*.distcp", "torch.distributed.checkpoint's", "have the trainer save_pretrained, or gather a "
     "full state dict (FSDP: FULL_STATE_DICT)"),
    ("*_model_states.pt", "DeepSpeed's", "run the zero_to_fp32.py that DeepSpeed wrote there, or "
     "have it gather 16-bit weights as it saves"),
)  # fmt: skip
INDEX = ".index.json"  # after the name of the whole file
REPAIR = "download the checkpoint again"
Written = frozenset[tuple[str, tuple[int, int] | None]]  # names of files, their sizes and times


@dataclass(frozen=True, slots=True)
class FileKind:
    """A family of weight files and its index."""

    name: str
    patterns: tuple[str, ...]
    indexes: tuple[str, ...]


SAFETENSORS = FileKind("safetensors", ("*.safetensors",), ("model.safetensors.index.json",))
PT = FileKind("pt", ("*.bin", "*.pt", "*.pth"), ("pytorch_model.bin.index.json",))


@dataclass(frozen=True, slots=True)
class Shards:
    """Weight files in order, and where the index (if there is one) says each tensor is."""

    files: tuple[Path, ...]
    index: Path | None = None
    where: Mapping[str, str] = field(default_factory=dict)


class AsTheyWere:
    """Files as they are when this is made, for whoever reads them from now on."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._stamps = {file: _stamp(file) for file in files}

    def check(self) -> None:
        """Raise ``ConfigError`` naming one that was written or replaced since.

        One that was removed passes: it was read to its end.
        """
        for file, before in self._stamps.items():
            if _stamp(file) not in (before, None):
                raise ConfigError(
                    f"{file} was written while it was read: what was read may be of two "
                    "checkpoints; write a checkpoint under another name, and rename it when it is "
                    "complete"
                )


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def find_shards(directory: Path, kind: FileKind) -> Shards:
    """The files of ``kind``: those the index names, else all (of .bin, .pt, .pth the first family).

    An index that knows nothing of a whole ``model.safetensors`` (``pytorch_model.bin``) beside it
    is what an earlier save has left, and is passed over, as by transformers.
    ``consolidated*`` copies count only when nothing else is there. Raises ``ConfigError`` when the
    index is broken or names a missing file.
    """
    for name in kind.indexes:
        index = directory / name
        if index.is_file():
            return _from_index(directory, index)
    for pattern in kind.patterns:
        found = sorted(_matching(directory, pattern))
        usual = [path for path in found if not path.name.startswith("consolidated")]
        if found:
            return Shards(tuple(usual or found))
    return Shards(())


def why_unwritten(file: Path) -> str:
    """Where the length of a file was set, as by what makes room before it copies, and its end not
    written: that, else "". A file system that does not tell counts as one where it was.
    """
    with file.open("rb") as opened, suppress(OSError):
        size = os.fstat(opened.fileno()).st_size
        if size and os.lseek(opened.fileno(), size - 1, os.SEEK_HOLE) < size:
            return (
                f"{file} has its full length, and was never written to its end (where that is all "
                "zeros, copy it without holes: cp --sparse=never)"
            )
    return ""


def why_none(directory: Path) -> str:
    """Behind an error that says that there are no weights: what is there in their place, if known,
    and the remedy.
    """
    for pattern, whose, remedy in _RANKS_OWN:
        if any(any(directory.glob(at)) for at in (pattern, f"*/{pattern}")):
            return f"; {whose} files there hold ranks' own parts, which are not read: {remedy}"
    return ""


def weight_files(directory: Path, *others: str) -> Written:
    """Names, sizes and times of the files that may hold weights, or match one of ``others``."""
    patterns = (*SAFETENSORS.patterns, *PT.patterns, *others)
    found = (file for pattern in patterns for file in _matching(directory, pattern))
    return frozenset((file.name, _stamp(file)) for file in found)


def _matching(directory: Path, pattern: str) -> Iterator[Path]:
    for path in directory.glob(pattern):
        if path.is_file() and not any(fnmatch(path.name, skip) for skip in (".*", *_NO_WEIGHTS)):
            yield path


def _from_index(directory: Path, index: Path) -> Shards:
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{index} is no weight index ({error!r}); {REPAIR}") from error
    if not isinstance(where, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in where.values()
    ):
        raise ConfigError(f"{index}: weight_map must map tensors to files beside it; {REPAIR}")
    whole = directory / index.name.removesuffix(INDEX)
    if whole.is_file() and whole.name not in where.values():
        return Shards((whole,))
    files = tuple(directory / name for name in sorted(set(where.values())))
    if missing := [path.name for path in files if not path.is_file()]:
        raise ConfigError(f"{directory} lacks {some(missing)}, named by {index.name}; {REPAIR}")
    return Shards(files, index, where)
