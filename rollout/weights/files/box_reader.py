"""Boxes of row-major tensors that lie in a file: read, or seen where the file is mapped.

A mapped file that is truncated while its bytes are copied ends the process by SIGBUS. Reading is an
error then, and costs a copy more: it is for files that somebody else may be writing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights import Box, Shape

_MIN_RUN = 64 << 10  # bytes in a row that are worth a read of their own
_CHUNK = 4 << 20  # bytes of whole rows at once, where a box takes less of each


class BoxReader:
    """One open file. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._begin(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _begin(self, path: Path) -> None:
        self.path, self._fd = path, -1
        self._memory = _ReusedMemory()

    def read(self, name: str, at: int, dtype: torch.dtype, shape: Shape, box: Box) -> Tensor:
        """The values of ``box`` of the tensor of ``shape`` at byte ``at``; memory of its own.

        Raises ``ConfigError`` where the file ends before them.
        """
        out = self._memory.take(box.numel * dtype.itemsize).view(dtype).view(box.shape)
        try:
            for place, start in self._runs(dtype, shape, box):
                self._fill(out[place], at + start)
            if len(shape) > 1 and self._is_cut_fine(dtype, shape, box):
                self._read_rows(out, at, shape, box)
        except EOFError:
            raise self._ends_within(name) from None
        except OSError as error:
            raise ConfigError(f"{self.path}: {name} cannot be read ({error})") from error
        return out

    def will_need(self, at: int, nbytes: int) -> None:
        """Have the system read these bytes meanwhile."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, at, nbytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _ends_within(self, name: str) -> ConfigError:
        return ConfigError(
            f"{self.path} ends within {name}: it has become shorter since it was opened; write a "
            "checkpoint under another name, and rename it when it is complete"
        )

    @staticmethod
    def _inner(shape: Shape, box: Box) -> int:
        """The last dimension that the box takes a part of; what follows it lies in a row."""
        parts = zip(box.starts, box.stops, shape, strict=True)
        return max((d for d, (a, b, n) in enumerate(parts) if (a, b) != (0, n)), default=0)

    def _is_cut_fine(self, dtype: torch.dtype, shape: Shape, box: Box) -> bool:
        inner = self._inner(shape, box)
        run = prod(box.shape[inner:]) * dtype.itemsize
        return inner > 0 and run < _MIN_RUN

    def _runs(
        self, dtype: torch.dtype, shape: Shape, box: Box
    ) -> Iterator[tuple[tuple[int, ...], int]]:
        """Of what lies in long rows: where each belongs in the box, and its first byte."""
        if box.numel == 0 or self._is_cut_fine(dtype, shape, box):
            return
        inner = self._inner(shape, box) if shape else 0
        strides = [prod(shape[d + 1 :]) * dtype.itemsize for d in range(len(shape))]
        first = sum(a * s for a, s in zip(box.starts, strides, strict=True))
        for place in product(*(range(n) for n in box.shape[:inner])):
            yield place, first + sum(i * s for i, s in zip(place, strides, strict=False))

    def _read_rows(self, out: Tensor, at: int, shape: Shape, box: Box) -> None:
        """Whole rows of the first dimension, of which the box takes a little each."""
        row = shape[1:]
        nbytes = prod(row) * out.dtype.itemsize
        step = max(1, _CHUNK // nbytes)
        rows = torch.empty((min(step, box.shape[0]), *row), dtype=out.dtype)
        for start in range(box.starts[0], box.stops[0], step):
            count = min(step, box.stops[0] - start)
            self._fill(rows[:count], at + start * nbytes)
            first = start - box.starts[0]
            out[first : first + count] = rows[(slice(count), *box.slices[1:])]

    def _fill(self, values: Tensor, at: int) -> None:
        left = values.view(-1).view(torch.uint8).numpy().data
        while left:
            count = os.preadv(self._fd, [left], at)
            if count == 0:
                raise EOFError
            left, at = left[count:], at + count


class MappedReader(BoxReader):
    """As ``BoxReader``, without a copy: for files that stay as they are until they are closed.

    One that has become shorter is noticed before each box.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        size = os.fstat(self._fd).st_size
        self._mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)

    def read(self, name: str, at: int, dtype: torch.dtype, shape: Shape, box: Box) -> Tensor:
        """A view of the mapping, which lives as long as that."""
        nbytes = prod(shape) * dtype.itemsize
        if at % dtype.itemsize:
            return super().read(name, at, dtype, shape, box)
        if os.fstat(self._fd).st_size < at + nbytes:
            raise self._ends_within(name)
        return self._mapped[at : at + nbytes].view(dtype).view(shape)[box.slices]

    def close(self) -> None:
        super().close()
        self._mapped = _bytes(0)


class _ReusedMemory:
    """Memory for one tensor after the other: fresh pages cost more than what is read into them."""

    def __init__(self) -> None:
        # Two: whoever asks for the next tensor often still holds the last one.
        self._lent: list[tuple[Tensor, ref[Any] | None]] = [(_bytes(0), None), (_bytes(0), None)]

    def take(self, nbytes: int) -> Tensor:
        """Bytes that nobody else holds; they are taken again once no tensor is left of them."""
        for index, (memory, lent) in enumerate(self._lent):
            if lent is None or lent() is None:
                if memory.numel() < nbytes:
                    memory = _bytes(nbytes)
                view = memory.numpy()[:nbytes]
                self._lent[index] = memory, ref(view)
                return torch.from_numpy(view)
        return _bytes(nbytes)


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8)
