"""What every rank held, in a file of its own: read again without a cut or a copy too many.

``rank-00001-of-00004.safetensors`` has the boxes of checkpoint tensors that rank 1 of 4 held. Ranks
of the same number find each of their boxes whole in their own file; any other number of ranks puts
theirs together of all files. Each file has the id of the save that wrote it: files of two saves are
no checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rollout.errors import ConfigError
from rollout.loader.hub import copy_side_files
from rollout.weights import Box, TensorMeta, WeightSlot
from rollout.weights.files.safetensors_files import META, SafetensorsFiles, read_header
from rollout.weights.files.shards import Shards

PATTERN = "rank-*-of-*.safetensors"
MARK = "rollout_boxes"
SAVE = "rollout_save"


def is_sharded(directory: Path) -> bool:
    """Whether ranks have written files there."""
    return any(directory.glob(PATTERN))


def save_shard(
    directory: Path, rank: int, size: int, held: Iterable[tuple[WeightSlot, Tensor]], *, save: str
) -> int:
    """Write what one rank holds of each slot; returns the file's bytes.

    ``save`` is the id of this save, the same on all ranks. The file has its name once it is
    complete; where another rank fails, the ids tell when they are opened. Takes as much host memory
    as the rank has weights. Raises ``ConfigError`` where it cannot be written.
    """
    boxes: dict[str, list[Any]] = {}
    tensors: dict[str, Tensor] = {}
    for slot, values in held:
        if slot.take.numel:
            key = str(len(boxes))
            boxes[key] = [slot.source, slot.shape, slot.take.starts, slot.take.stops]
            tensors[key] = values.detach().to("cpu", copy=True).contiguous()
    path = directory / f"rank-{rank:05d}-of-{size:05d}.safetensors"
    half = path.with_suffix(".part")
    try:
        shutil.rmtree(half, ignore_errors=True)  # of a save that was killed
        half.mkdir(parents=True)
        file = half / path.name
        file.touch()
        mode = file.stat().st_mode
        # safetensors 0.8 has a temporary file beside it, and makes files that only their owner may
        # read.
        save_file(tensors, file, metadata={MARK: json.dumps(boxes), SAVE: save})
        file.chmod(mode)
        os.replace(file, path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} was not written ({error}); mend that and save again") from error
    finally:
        shutil.rmtree(half, ignore_errors=True)  # it may be what filled the disk
    return path.stat().st_size


def complete_save(directory: Path, size: int, source: Path) -> None:
    """Put config and tokenizer of ``source`` beside the files of ``size`` ranks, and remove those
    of another number, with which a save is no checkpoint. Raises ``ConfigError`` where it fails.
    """
    _remove_others(directory, size)
    try:
        copy_side_files(source, directory)
    except OSError as error:
        raise ConfigError(
            f"config and tokenizer of {source} were not copied to {directory} ({error}); mend that "
            "and save again"
        ) from error


def _remove_others(directory: Path, size: int) -> None:
    for path in (*directory.glob(PATTERN), *directory.glob("rank-*-of-*.part")):
        if path.stem.endswith(f"-of-{size:05d}"):
            continue
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{path}, which another number of ranks saved, cannot be removed ({error}): remove "
                "it, as files of both are no checkpoint"
            ) from error


@dataclass(frozen=True, slots=True)
class _Piece:
    files: SafetensorsFiles
    entry: str
    box: Box


class ShardedFiles:
    """Every rank's files as one checkpoint. Raises ``ConfigError`` naming what is missing.

    ``mapped`` is for files that nobody writes meanwhile.
    """

    def __init__(self, directory: Path, *, mapped: bool = True) -> None:
        self._mapped = mapped
        self._pieces: dict[str, dict[Box, _Piece]] = {}
        self._metadata: dict[str, TensorMeta] = {}
        self._files: list[SafetensorsFiles] = []
        try:
            paths = rank_files(directory)
            saves = {path.name: self._open(path) for path in paths}
            if len(set(saves.values())) != 1:
                raise ConfigError(
                    f"{directory} holds ranks' files of different saves {saves}: one of them "
                    "failed or is not complete; save again by save_sharded_state"
                )
        except BaseException:
            self.close()
            raise

    def metadata(self) -> Mapping[str, TensorMeta]:
        return self._metadata

    def read(self, name: str, box: Box) -> Tensor:
        pieces = self._pieces[name]
        for held, piece in pieces.items():
            if held.intersect(box) == box:
                back = tuple(-start for start in held.starts)
                return piece.files.read(piece.entry, box.shifted(back))
        out, found = torch.empty(box.shape, dtype=self._metadata[name].dtype), 0
        for held, piece in pieces.items():
            if (common := held.intersect(box)) is None:
                continue
            inside, there = (tuple(-start for start in of.starts) for of in (box, held))
            part = piece.files.read(piece.entry, common.shifted(there))
            out[common.shifted(inside).slices] = part
            found += common.numel
        if found != box.numel:
            raise ConfigError(f"{name}: the ranks' files do not hold {box.starts}..{box.stops}")
        return out

    def close(self) -> None:
        for files in self._files:
            files.close()

    def _open(self, path: Path) -> str | None:
        """Take up one rank's file; returns the id of its save."""
        files = SafetensorsFiles(Shards((path,)), mapped=self._mapped)
        self._files.append(files)
        marks = json.loads(read_header(path)[0]).get(META) or {}
        boxes = json.loads(marks.get(MARK, "null"))
        if not isinstance(boxes, dict) or set(boxes) != set(files.metadata()):
            raise ConfigError(f"{path} was not written by save_sharded_state; choose load_format")
        for entry, (source, shape, starts, stops) in boxes.items():
            box = Box(tuple(starts), tuple(stops))
            meta = TensorMeta(source, files.metadata()[entry].dtype, tuple(shape))
            if self._metadata.setdefault(source, meta) != meta:
                raise ConfigError(f"{path}: {source} is of another model than the other files'")
            self._pieces.setdefault(source, {}).setdefault(box, _Piece(files, entry, box))
        return marks.get(SAVE)


def rank_files(directory: Path) -> list[Path]:
    """One set of ranks' files, all of them; ``ConfigError`` else."""
    found = sorted(directory.glob(PATTERN))
    sizes = {path.stem.rpartition("-")[2] for path in found}
    if len(sizes) != 1 or not next(iter(sizes)).isdigit():
        what = "files of ranks" if not found else "one set of ranks' files"
        raise ConfigError(
            f"{directory} does not hold {what} ({PATTERN}); write them by save_sharded_state"
        )
    size = int(next(iter(sizes)))
    if len(found) != size:
        raise ConfigError(f"{directory} holds {len(found)} of {size} ranks' files; copy all")
    return found
