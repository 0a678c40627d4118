"""What a sanitizer looks for on a card, looked for in Triton's interpreter.

Its programs run one after the other, so a race between them shows in no result. Here every load and
store is written down: none may lie outside of all tensors of the launch, and no byte that one
program writes may another touch. (Two warps of one program are not told apart.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


class Launch:
    """The accesses of one launch, program by program."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        spans = sorted(_span(x) for x in tensors if x.numel())
        self._starts = np.array([start for start, _ in spans], np.int64)
        # Of overlapping tensors the furthest end counts.
        self._stops = np.maximum.accumulate(np.array([stop for _, stop in spans], np.int64))
        self._program = -1
        self._touched: dict[str, list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]] = {
            "read": [],
            "written": [],
        }
        self.outside: list[str] = []

    def begin_program(self) -> None:
        self._program += 1

    def touch(self, what: str, pointers: Any, mask: Any) -> None:
        data = np.asarray(pointers.data)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        live = np.broadcast_to(np.asarray(mask.data, dtype=bool), data.shape)
        places = np.unique(data[live].astype(np.int64)[:, None] + np.arange(size))  # bytes
        at = np.searchsorted(self._starts, places, side="right") - 1
        outside = (at < 0) | (places >= self._stops[np.maximum(at, 0)])
        if outside.any():
            self.outside.append(f"program {self._program}: {what} outside of every tensor")
        self._touched[what].append((places, np.full(len(places), self._program)))

    def races(self) -> list[str]:
        """What one program wrote and another read or wrote."""
        owners, found = self._pairs("written"), []
        if len(np.unique(owners[0])) < len(owners[0]):
            found.append("two programs write to one place")
        places, programs = self._pairs("read")
        if len(owners[0]):
            at = np.minimum(np.searchsorted(owners[0], places), len(owners[0]) - 1)
            if ((owners[0][at] == places) & (owners[1][at] != programs)).any():
                found.append("a program reads what another writes")
        return found

    def _pairs(self, what: str) -> tuple[Any, Any]:
        """Places in ascending order and the programs that touched them, each pair once."""
        kept = self._touched[what]
        if not kept:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        both = np.stack([np.concatenate(part) for part in zip(*kept, strict=True)])
        places, programs = np.unique(both, axis=1)
        return places, programs


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


@contextmanager
def sanitized(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """The launches that the interpreter runs meanwhile, with their accesses."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    launches: list[Launch] = []
    before = {
        name: getattr(InterpreterBuilder, name)
        for name in ("create_masked_load", "create_masked_store", "set_grid_idx")
    }
    prepare = GridExecutor._init_args_hst

    def begin(executor: Any, arguments: Any, kwargs: Any) -> Any:
        ready = prepare(executor, arguments, kwargs)
        launches.append(Launch([x for x in ready[0] if isinstance(x, torch.Tensor)]))
        return ready

    def load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].touch("read", pointers, mask)
        return before["create_masked_load"](builder, pointers, mask, *rest)

    def store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].touch("written", pointers, mask)
        return before["create_masked_store"](builder, pointers, value, mask, *rest)

    def atomic(*_: Any) -> Any:
        raise AssertionError("the accesses of atomics are not looked at")

    def program(builder: Any, *place: int) -> None:
        launches[-1].begin_program()
        before["set_grid_idx"](builder, *place)

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "_init_args_hst", begin)
        patch.setattr(InterpreterBuilder, "create_masked_load", load)
        patch.setattr(InterpreterBuilder, "create_masked_store", store)
        patch.setattr(InterpreterBuilder, "set_grid_idx", program)
        for name in ("create_atomic_rmw", "create_atomic_cas"):
            patch.setattr(InterpreterBuilder, name, atomic)
        yield launches
