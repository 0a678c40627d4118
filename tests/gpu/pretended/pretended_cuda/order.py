"""What streams do to memory, and whether anything orders it.

Work runs here at once, in the order in which it was asked for; a card keeps to that order within a
stream alone. So every access is written down with its stream and its place there. Two accesses to
the same bytes, one of which writes, are refused where they are of two streams and the second does
not follow on the first: by an event, ``wait_stream``, or a wait of the host, of whichever thread.
Memory goes back to the stream that it was made on: it must not be let go while another stream may
still be at it. Of what a capture does nothing is written down, of its replays all. What processes
do to each other's memory is not seen, nor what only another moment would bring to light.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

Clock = dict[int, int]  # by stream: how much of its work is behind us
Touch = tuple[int, int, bool]  # first byte, behind the last, whether they are written

_lock = threading.RLock()
_lines: list[Line] = []
_done: Clock = {}  # what some thread of the host has waited for
_memory: dict[int, Memory] = {}  # by its first byte
_starts: list[int] = []
_gone: deque[Memory] = deque()  # let go, and not struck off yet
_refused: list[str] = []  # where nobody could be told


class Line:
    """The work of one stream, in its order."""

    def __init__(self) -> None:
        self.id, self.time = len(_lines), 0
        self.behind: Clock = {}
        _lines.append(self)

    def begin(self) -> None:
        """More work is asked of it: that begins after all that the host has waited for."""
        self.time += 1
        join(self.behind, _done)
        self.behind[self.id] = self.time


class Memory:
    """The bytes of one storage, and who touched them last."""

    def __init__(self, storage: torch.UntypedStorage, made: Line | None) -> None:
        self.start, self.made, self.of = storage.data_ptr(), made, id(storage)
        self.stop = self.start + storage.nbytes()
        self.touched: dict[tuple[int, Touch], tuple[int, str]] = {}

    def touch(self, line: Line, what: Touch, by: str) -> None:
        start, stop, writes = what
        for (other, (first, last, wrote)), (time, before) in list(self.touched.items()):
            if time <= _done.get(other, 0):
                del self.touched[other, (first, last, wrote)]
                continue
            meet = first < stop and start < last and (writes or wrote)
            if meet and time > line.behind.get(other, 0):
                raise RuntimeError(
                    f"{by} on stream {line.id} {'writes' if writes else 'reads'} what {before} on "
                    f"stream {other} may still {'write' if wrote else 'read'}"
                )
        self.touched[line.id, what] = line.time, by

    def let_go(self) -> None:
        """Takes no lock: the garbage collector calls it, anywhere."""
        _gone.append(self)
        line = self.made
        for (other, _), (time, by) in list(self.touched.items()) if line is not None else ():
            if time > max(_done.get(other, 0), line.behind.get(other, 0)):
                _refused.append(
                    f"memory of stream {line.id} was let go while {by} on stream {other} may "
                    "still be at it"
                )


def join(clock: Clock, other: Clock) -> None:
    for line, time in list(other.items()):  # another thread may ask more of a stream
        if time > clock.get(line, 0):
            clock[line] = time


def wait_for(clock: Clock) -> None:
    """The host has."""
    with _lock:
        join(_done, clock)


def wait_for_all() -> None:
    wait_for({line.id: line.time for line in list(_lines)})


def is_done(line: int, time: int) -> bool:
    return time <= _done.get(line, 0)


def memory_of(tensor: Tensor, made: Line | None = None) -> Memory:
    """``made``: on which stream, where it is new."""
    _strike_off()
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    found = _memory.get(start)
    if found is None or found.of != id(storage):  # of one that is going, on another thread
        if found is None:
            insort(_starts, start)
        found = _memory[start] = Memory(storage, made)
        weakref.finalize(storage, found.let_go).atexit = False
    return found


def _strike_off() -> None:
    while _gone:
        memory = _gone.popleft()
        if _memory.get(memory.start) is memory:
            del _memory[memory.start]
            del _starts[bisect_right(_starts, memory.start) - 1]


def touch(
    line: Line, by: str, reads: Iterable[Tensor], writes: Iterable[Tensor], *, new: bool = False
) -> None:
    """One piece of work on a stream. ``new``: it is the first to use what it writes."""
    with _lock:
        if _refused:
            raise RuntimeError(_refused.pop())
        line.begin()
        for tensors, wrote in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel():
                    memory = memory_of(tensor, line if new and wrote else None)
                    memory.touch(line, (*_span(tensor), wrote), by)


def touch_places(line: Line, by: str, places: dict[tuple[int, bool], tuple[int, int]]) -> None:
    """As ``touch``, by addresses: what a kernel did, by the storage that it did it to."""
    with _lock:
        line.begin()
        for (start, wrote), (first, last) in places.items():
            if start in _memory:
                _memory[start].touch(line, (first, last, wrote), by)


def storage_at(pointer: int) -> int | None:
    """Where the storage around an address begins."""
    with _lock:
        _strike_off()
        at = bisect_right(_starts, pointer)
        start = _starts[at - 1] if at else None
        return start if start is not None and pointer < _memory[start].stop else None


class Watch(TorchDispatchMode):
    """What torch's operations do to memory meanwhile, on one stream."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        outs = {x.untyped_storage().data_ptr() for x in _tensors(found)}
        reads, writes, given = [], [], set()
        for argument, value in _given(func._schema, args, kwargs):
            for tensor in _tensors(value):
                storage = tensor.untyped_storage().data_ptr()
                given.add(storage)
                alias = argument.alias_info
                if alias is not None and alias.is_write:
                    writes.append(tensor)
                elif alias is None or storage not in outs:  # else it is a view of it
                    reads.append(tensor)
        made = [x for x in _tensors(found) if x.untyped_storage().data_ptr() not in given]
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("new_") or name.endswith("_like"):
            reads = []  # of its form alone
        touch(self._line, name, reads, made, new=True)
        if writes:
            touch(self._line, name, (), writes)
        return found


def _given(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for position, argument in enumerate(schema.arguments):
        if not argument.kwarg_only and position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


class Places:
    """What a launch of the interpreter reads and writes: of each storage from the first byte to the
    last.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[int, bool], tuple[int, int]] = {}

    def note(self, pointers: Any, mask: Any, wrote: bool) -> None:
        places = pointers.data[mask.data] if mask is not None else pointers.data.reshape(-1)
        if not len(places):
            return
        first, last = int(places.min()), int(places.max())
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        for start in {storage_at(first), storage_at(last)}:
            if start is not None:
                low, high = self.found.get((start, wrote), (first, last + size))
                self.found[start, wrote] = min(low, first), max(high, last + size)


_places: Places | None = None  # of the launch that runs: they run one at a time


@contextmanager
def looking() -> Iterator[Places]:
    global _places
    _places = found = Places()
    try:
        yield found
    finally:
        _places = None


def look_at_kernels() -> None:
    """Have the interpreter say what its kernels load and store."""
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store

    def noted_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        if _places is not None:
            _places.note(pointers, mask, False)
        return load(builder, pointers, mask, *rest)

    def noted_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if _places is not None:
            _places.note(pointers, mask, True)
        return store(builder, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_load = noted_load
    InterpreterBuilder.create_masked_store = noted_store
