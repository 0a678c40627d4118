"""What is captured, what is waited for, and what arrives only then."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

_state = threading.local()
_late: list[Callable[[], Any]] = []
_waits = threading.RLock()  # who waits beside another thread goes on when all has been done
_pools: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # their streams
_pinned: list[Tensor] = []  # kept: no other tensor may get their addresses


def wait(what: str) -> None:
    """The device has done all that it was asked for."""
    refuse_in_capture(what)
    with _waits, torch.inference_mode():
        while _late:
            _late.pop(0)()


def pinned(tensor: Tensor) -> Tensor:
    _pinned.append(tensor)
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    start = tensor.untyped_storage().data_ptr()
    return any(start == x.untyped_storage().data_ptr() for x in _pinned)


def read_later(source: Tensor) -> None:
    """The device will read ``source``; pageable memory is read at once."""
    if not is_pinned(source):
        return
    before = source.clone()

    def compare() -> None:
        assert torch.equal(before, source), "pinned memory was changed before it was read"

    _late.append(compare)


def copy_later(target: Tensor, values: Tensor) -> None:
    """Pinned memory gets ``values`` when somebody waits; until then it holds what is wrong."""
    refuse_in_capture("a copy to the host")
    _late.append(functools.partial(target.copy_, values.clone()))
    target.view(-1).view(torch.uint8).fill_(0xA5)


def refuse_in_capture(what: str) -> None:
    if getattr(_state, "graph", None) is not None:
        raise RuntimeError(f"{what}: operation not permitted when stream is capturing")


def record(run: Callable[[], Any], found: Any) -> None:
    """While a graph is captured: it is to ``run`` this again, into the memory of ``found``."""
    graph = getattr(_state, "graph", None)
    if graph is not None:
        graph.calls.append((run, tensors_of(found)))


class Graph:
    """``torch.cuda.CUDAGraph``: calls with the memory they were given, and what they gave."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Any], list[Tensor]]] = []

    def replay(self) -> None:
        assert self.calls, "nothing was captured, or it was reset"
        for run, outs in self.calls:
            for old, new in zip(outs, tensors_of(run()), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)

    def reset(self) -> None:
        self.calls = []


@contextmanager
def capture(graph: Graph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
    assert getattr(_state, "graph", None) is None
    # On another stream torch finds no room in what the captures before took.
    assert _pools.setdefault(pool or graph, stream) is stream, "a pool is for one stream"
    _state.graph = graph
    try:
        yield
    finally:
        _state.graph = None


class Pool:
    """Memory of graphs."""


class Stream:
    """All of them are one."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None:
        wait("synchronize")


class Event:
    """Waiting for any waits for everything."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        wait("synchronize")


def tensors_of(tree: Any) -> list[Tensor]:
    """Ordinary tensors in nested containers."""
    return [x for x in tree_flatten(tree)[0] if type(x) is Tensor]
