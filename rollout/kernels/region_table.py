"""Which part of which region a program works on: one launch for many regions of memory.

A region is lines of consecutive columns; ``blocks`` of ``BLOCK`` columns are counted through its
lines, and every program takes ``ROUNDS`` of them, one after the other. The table holds addresses:
who makes its rows has checked that all they name lies inside the memory behind the tensors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

BLOCK, ROUNDS = 512, 16  # with 2 warps the best of 27 shapes that were measured on an H100
_WORDS, _BYTES = 8, 16  # elements that a thread reads at once, and where they may begin
MOST_ROWS = 64  # of one region: what is cut up more goes by itself
NARROW, MOST_NARROW = 64, 64  # lines of fewer columns leave a block idle: so many, and no more
_KEPT = 64  # plans: an update of many buckets takes one for each

Row = tuple[int, ...]  # what a kernel reads of one run of lines
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RegionTable:
    """On the device. ``owners[p]``: the row of program p; ``firsts[p]``: its first block.
    Programs of row r end before ``ends[r]``. ``rounds``: blocks of a program."""

    rows: Tensor  # [rows, words] int64
    owners: Tensor  # [programs] int32
    firsts: Tensor  # [programs] int64
    ends: Tensor  # [rows] int64
    rounds: int

    @property
    def grid(self) -> tuple[int]:
        return (len(self.owners),)


class RegionTables:
    """Keeps the last plans: an update like the one before finds its own again."""

    def __init__(self) -> None:
        self._plans: OrderedDict[object, tuple[object, object]] = OrderedDict()
        self._lock = threading.Lock()

    def planned(
        self, places: tuple[object, ...], more: Sequence[object], make: Callable[[], T]
    ) -> T:
        """What ``make`` made for these ``places`` (hashed) and this ``more`` (compared), if it is
        among the last.
        """
        more = tuple(more)
        with self._lock:
            found: tuple[object, object] | None = self._plans.pop(places, None)
            if found is None or found[0] != more:
                found = (more, make())
            self._plans[places] = found
            while len(self._plans) > _KEPT:
                self._plans.popitem(last=False)
            plan: T = found[1]  # type: ignore[assignment]
            return plan

    def clear(self) -> None:
        """What was planned lies elsewhere now."""
        with self._lock:
            self._plans.clear()


def is_whole(address: int, lines: int, columns: int, stride: int) -> bool:
    """Whether lines of so many elements, ``stride`` apart, are whole blocks of wide words: so are
    all large weights, whatever part of them a rank has.
    """
    return not (address % _BYTES or columns % BLOCK or (lines > 1 and stride % _WORDS))


def is_too_narrow(lines: int, columns: int) -> bool:
    """Whether most of every block of such lines would be idle."""
    return columns < NARROW and lines > MOST_NARROW


def make_table(found: Sequence[tuple[Row, int]], at: torch.device) -> RegionTable:
    """Of rows, each with how many blocks it has."""
    rows, blocks = zip(*found, strict=True)
    rounds = min(ROUNDS, 1 << (max(blocks) - 1).bit_length())
    programs = -(-torch.tensor(blocks) // rounds)
    owners, ends = torch.repeat_interleave(programs), programs.cumsum(0)
    firsts = (torch.arange(len(owners)) - (ends - programs)[owners]) * rounds
    # Copies that are waited for: another stream may use the table next.
    return RegionTable(
        torch.tensor(rows).to(at), owners.int().to(at), firsts.to(at), ends.to(at), rounds
    )
