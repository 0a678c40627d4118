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
    """In order with everything else, but for what a test has it ``do_late``: when it is asked for
    another copy or kernel, or somebody waits for it.
    """

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self._late: list[Callable[[], Any]] = []

    def do_late(self, work: Callable[[], Any]) -> None:
        self._late.append(work)
        _streams.append(self)

    def catch_up(self) -> None:
        while self._late:
            self._late.pop(0)()

    def wait_stream(self, other: Stream) -> None:
        other.catch_up()

    def wait_event(self, event: Event) -> None:
        event.stream.catch_up()

    def synchronize(self) -> None:
        self.catch_up()
        wait("synchronize")


class Event:
    """Waiting for any waits for everything of its stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream = _default

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        self.stream.synchronize()


_default = Stream()
_streams: list[Stream] = []  # that are to do something late


def current_stream(*_: Any) -> Stream:
    """The calling thread's, as on a card."""
    return getattr(_state, "stream", _default)


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before = current_stream()
    _state.stream = stream
    try:
        yield
    finally:
        _state.stream = before


def synchronize(*_: Any) -> None:
    while _streams:
        _streams.pop(0).catch_up()
    wait("synchronize")


def tensors_of(tree: Any) -> list[Tensor]:
    """Ordinary tensors in nested containers."""
    return [x for x in tree_flatten(tree)[0] if type(x) is Tensor]
