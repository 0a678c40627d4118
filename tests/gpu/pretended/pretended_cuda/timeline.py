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

from pretended_cuda.order import (
    Clock,
    Line,
    Places,
    Watch,
    is_done,
    join,
    touch,
    touch_places,
    wait_for,
    wait_for_all,
)

_state = threading.local()
_own = 0  # the number of the card that the process works on
_late: list[tuple[int, int, Callable[[], Any]]] = []  # by a stream, and its place there
_waits = threading.RLock()  # who waits beside another thread goes on when that has been done
_pools: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # their streams
_broken: weakref.WeakSet[Any] = weakref.WeakSet()  # pools of captures that failed
_pinned: list[Tensor] = []  # kept: no other tensor may get their addresses


def set_device(index: int) -> None:
    global _own
    _own = _state.device = index


def current_device() -> int:
    """The calling thread's, as on a card: of a new one the first."""
    return getattr(_state, "device", 0)


@contextmanager
def on_device(device: Any) -> Iterator[None]:
    """``torch.cuda.device``, of a device or a number."""
    before = current_device()
    _state.device = getattr(device, "index", device)
    try:
        yield
    finally:
        _state.device = before


def refuse_other_device(what: str) -> None:
    """What is done on whatever device the thread has, which gets a context by it."""
    if current_device() != _own:
        raise RuntimeError(f"{what} on GPU {current_device()}, where this process has no context")


def wait(what: str) -> None:
    """The calling thread's stream has done all that it was asked for."""
    refuse_in_capture(what)
    _waited(current_stream().line.behind)


def _waited(clock: Clock) -> None:
    """The host has, for that."""
    wait_for(clock)
    with _waits, torch.inference_mode():
        arrived = [late for late in _late if is_done(*late[:2])]
        for late in arrived:
            _late.remove(late)
            late[2]()


def done(run: Callable[[], Any]) -> Callable[[], Any]:
    """``run``, operations of torch's, as work of the stream of who calls it."""

    def call() -> Any:
        if captures():
            return run()
        with Watch(current_stream().line):
            return run()

    return call


def launched(run: Callable[[], Places], name: str) -> Callable[[], Any]:
    """As ``done``, a kernel."""

    def call() -> None:
        places = run()
        if not captures():
            touch_places(current_stream().line, name, places.found)

    return call


def touches(name: str, reads: list[Tensor], writes: list[Tensor], *, new: bool = False) -> None:
    """The stream of who calls it does that."""
    if not captures():
        touch(current_stream().line, name, reads, writes, new=new)


def captures() -> bool:
    """Whether the calling thread does."""
    return getattr(_state, "graph", None) is not None


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

    _later(compare)


def copy_later(target: Tensor, values: Tensor) -> None:
    """Pinned memory gets ``values`` when somebody waits; until then it holds what is wrong."""
    refuse_in_capture("a copy to the host")
    _later(functools.partial(target.copy_, values.clone()))
    target.view(-1).view(torch.uint8).fill_(0xA5)


def _later(work: Callable[[], Any]) -> None:
    line = current_stream().line
    with _waits:
        _late.append((line.id, line.time, work))


def refuse_in_capture(what: str) -> None:
    if captures():
        _state.graph.broken = True
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
        self.broken = False

    def replay(self) -> None:
        assert self.calls, "nothing was captured, or it was reset"
        for run, outs in self.calls:
            for old, new in zip(outs, tensors_of(run()), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    touches("a replay", [], [old])
                    old.copy_(new)

    def reset(self) -> None:
        self.calls = []


@contextmanager
def capture(graph: Graph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
    """``torch.cuda.graph``. Where something was refused the end of the capture fails: torch stays
    on its stream then, and 2.11 takes no other capture into the pool.
    """
    assert getattr(_state, "graph", None) is None
    pool = pool or graph
    if pool in _broken:
        raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
    # On another stream torch finds no room in what the captures before took.
    assert _pools.setdefault(pool, stream) is stream, "a pool is for one stream"
    before, _state.stream, _state.graph = current_stream(), stream or Stream(), graph
    try:
        yield
    finally:
        _state.graph = None
        if graph.broken:
            _broken.add(pool)
        else:
            _state.stream = before


class Pool:
    """Memory of graphs."""


class Stream:
    """Its work is done when it is asked for, but for what a test has it ``do_late``: when it is
    asked for another copy or kernel, or somebody waits for it.
    """

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self._late: list[Callable[[], Any]] = []
        self.line = Line()

    def do_late(self, work: Callable[[], Any]) -> None:
        self._late.append(work)
        _streams.append(self)

    def catch_up(self) -> None:
        while self._late:
            with on_stream(self):
                self._late.pop(0)()

    def wait_stream(self, other: Stream) -> None:
        other.catch_up()
        join(self.line.behind, other.line.behind)

    def wait_event(self, event: Event) -> None:
        join(self.line.behind, event.clock())

    def synchronize(self) -> None:
        self.catch_up()
        refuse_in_capture("synchronize")
        _waited(self.line.behind)


class Event:
    """Of what a stream was asked for before."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream, self._late = _default, False
        self._clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        self._clock = dict(self.stream.line.behind)
        self._late = bool(self.stream._late)

    def clock(self) -> Clock:
        self.stream.catch_up()
        return self.stream.line.behind if self._late else self._clock

    def query(self) -> bool:
        refuse_other_device("a wait for an event")
        _waited(self.clock())
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        refuse_other_device("a wait for an event")
        refuse_in_capture("synchronize")
        _waited(self.clock())


_default = Stream()
_streams: list[Stream] = []  # that are to do something late


def current_stream(*_: Any) -> Stream:
    """The calling thread's, as on a card."""
    return getattr(_state, "stream", _default)


def default_stream(*_: Any) -> Stream:
    return _default


def set_stream(stream: Stream) -> None:
    _state.stream = stream


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before = current_stream()
    _state.stream = stream
    try:
        with on_device(_own):
            yield
    finally:
        _state.stream = before


def synchronize(*_: Any) -> None:
    while _streams:
        _streams.pop(0).catch_up()
    refuse_in_capture("synchronize")
    wait_for_all()
    _waited({})


def tensors_of(tree: Any) -> list[Tensor]:
    """Ordinary tensors in nested containers."""
    return [x for x in tree_flatten(tree)[0] if type(x) is Tensor]
