"""A CUDA device that is none: tensors hold host memory, kernels run in Triton's interpreter.

``install()`` replaces, for the whole process, what torch says of CUDA. What it then shows is
what Python code does: which tensors lie where, what meets on which device, what a captured graph
holds. It refuses what a card refuses: tensors of two devices in one operation, numpy views of
device memory, and anything that waits for the device while a graph is captured. A graph records its
operations with the memory that they were given, and a replay runs them on that memory, so an
address that has moved gives stale values, as on a card. A copy that need not be waited for arrives
when somebody waits: until then host memory holds what is wrong, and pinned memory that is read must
not change. Streams are in order with everything else: what is missing between them does not show.

``sitecustomize.py`` beside this file installs it in every process that has this folder on its path.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)  # the process's own: ``torch.cuda.set_device`` sets it
MEMORY = 4 << 30
CARDS = 2
UUID = "GPU-5e1f0000-0000-4000-8000-00000000ca4"  # and the card's number
FACTORIES = (
    *("empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "rand", "randn"),
    *("randint", "randperm", "linspace", "empty_strided", "eye"),
)
#: take indices on the host as well as on the device
INDEXED = {"__getitem__", "__setitem__", "index_put_", "index_put", "index"}
#: wait for the device, or have a shape that depends on values
WAITS = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique"),
    *("masked_select", "equal", "allclose", "is_nonzero", "bincount", "repeat_interleave"),
}
#: say something of a tensor and run nothing
DESCRIBE = {
    *("__get__", "size", "stride", "dim", "numel", "element_size", "data_ptr", "is_contiguous"),
    *("__len__", "untyped_storage", "storage_offset", "is_floating_point", "type", "nelement"),
    *("is_pinned", "get_device", "is_complex", "is_inference", "__hash__", "__format__"),
}
_state = threading.local()
_cards: weakref.WeakSet[Any] = weakref.WeakSet()


class Card(torch.Tensor):
    """A tensor that says it is on ``DEVICE``; ``inner`` holds its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Card:
        assert type(inner) is Tensor
        made: Card = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        _cards.add(made)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was not seen as a call of torch's")

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"Card({self.inner!r})"


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    if name in ("__get__", "__set__"):
        return _attribute(func, name, args)
    if name in ("to", "cpu", "cuda"):
        return _moved(name, args, kwargs)
    if name in ("numpy", "__array__"):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    if name == "pin_memory":
        raise RuntimeError("cannot pin memory of a device")
    if name == "get_device":
        return DEVICE.index
    if name == "_has_compatible_shallow_copy_type":
        return False  # ``Module.cuda()`` makes new parameters then
    if name == "copy_":
        return _copied(*args, **kwargs)
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
        return func(*_plain(args), **_plain(kwargs))  # new_empty(device="cpu") and such
    if name not in DESCRIBE:
        _check_devices(name, args, kwargs)
    if name in WAITS:
        wait(name)
    kwargs = {key: value for key, value in kwargs.items() if key != "device"}
    plain_args, plain_kwargs = _plain(args), _plain(kwargs)
    run = functools.partial(func, *plain_args, **plain_kwargs)
    found = run()
    if name not in DESCRIBE:
        record(run, found)
    # What was changed in place comes back as it is.
    before = {id(x.inner): x for x in _tensors((args, kwargs)) if isinstance(x, Card)}
    return tree_map(lambda x: before[id(x)] if id(x) in before else _wrapped(x), found)


def _attribute(func: Any, name: str, args: tuple[Any, ...]) -> Any:
    card, attribute = args[0], func.__self__.__name__
    if name == "__set__":
        if attribute != "data" or not isinstance(args[1], Card):
            raise TypeError(f"cannot set .{attribute} of a tensor on cuda:0 to that")
        card.inner = args[1].inner
        return None
    fixed = {"device": DEVICE, "is_cuda": True, "is_cpu": False}
    if attribute in fixed:
        return fixed[attribute]
    value = getattr(card.inner, attribute)
    return _wrapped(value)


def _moved(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``to``, ``cpu`` and ``cuda`` of a tensor anywhere."""
    source, rest = args[0], [*args[1:], *kwargs.values()]
    target = {"cpu": torch.device("cpu"), "cuda": DEVICE}.get(name)
    dtype = next((x for x in rest if isinstance(x, torch.dtype)), None)
    for x in rest:
        if isinstance(x, str | torch.device):
            target = torch.device(x)
        elif isinstance(x, Tensor):
            target, dtype = x.device, x.dtype
    here = source.device
    target = here if target is None else target
    plain = source.inner if isinstance(source, Card) else source
    if target.type == here.type:
        run = functools.partial(plain.to, dtype or plain.dtype)
    else:
        if target.type == "cpu":
            wait("a copy to the host")
        elif kwargs.get("non_blocking"):
            read_later(plain)
        run = functools.partial(_fresh, plain, dtype or plain.dtype)
    found = run()
    record(run, found)
    if found is plain:
        return source
    return found if target.type == "cpu" else _wrapped(found)


def _fresh(plain: Tensor, dtype: torch.dtype) -> Tensor:
    return plain.detach().to(dtype, copy=True)


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    a, b = (x.inner if isinstance(x, Card) else x for x in (target, source))
    if not isinstance(target, Card):
        if not (non_blocking and is_pinned(a)):
            wait("a copy to the host")
        else:
            refuse_in_capture("a copy to the host")
            _late.append(functools.partial(a.copy_, b.clone()))
            a.view(-1).view(torch.uint8).fill_(0xA5)
            return target
    elif non_blocking and not isinstance(source, Card):
        read_later(b)
    run = functools.partial(a.copy_, b)
    run()
    record(run, a)
    return target


def _check_devices(name: str, args: Any, kwargs: Any) -> None:
    found = _tensors((args, kwargs))
    if name in INDEXED and isinstance(args[0], Card):
        values = args[2:] if name == "__setitem__" else ()
        found = [args[0], *(x for x in values if isinstance(x, Tensor))]
        if name == "__setitem__" and not _tensors(args[1]):
            return  # a copy into a part of it
    strange = [x for x in found if not isinstance(x, Card) and x.dim() > 0]
    if strange:
        raise RuntimeError(
            f"{name}: Expected all tensors to be on the same device, but found at least two "
            f"devices, cuda:0 and cpu! (shapes {[tuple(x.shape) for x in strange]} on the cpu)"
        )


def _tensors(tree: Any) -> list[Any]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


def _plain(tree: Any) -> Any:
    return tree_map(lambda x: x.inner if isinstance(x, Card) else x, tree)


def _wrapped(tree: Any) -> Any:
    return tree_map(lambda x: Card(x) if isinstance(x, Tensor) else x, tree)


# ---- what is waited for ----

_late: list[Callable[[], Any]] = []
_pinned: list[Tensor] = []  # kept: no other tensor may get their addresses


def wait(what: str) -> None:
    """The device has done all that it was asked for."""
    refuse_in_capture(what)
    with torch.inference_mode():
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


# ---- capture and replay ----


def refuse_in_capture(what: str) -> None:
    if getattr(_state, "graph", None) is not None:
        raise RuntimeError(f"{what}: operation not permitted when stream is capturing")


def record(run: Callable[[], Any], found: Any) -> None:
    graph = getattr(_state, "graph", None)
    if graph is not None:
        graph.calls.append((run, [x for x in _tensors(found) if type(x) is Tensor]))


class Graph:
    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Any], list[Tensor]]] = []

    def replay(self) -> None:
        assert self.calls, "nothing was captured, or it was reset"
        for run, outs in self.calls:
            for old, new in zip(outs, _tensors(run()), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)

    def reset(self) -> None:
        self.calls = []


@contextmanager
def capture(graph: Graph, **_: Any) -> Iterator[None]:
    assert getattr(_state, "graph", None) is None
    _state.graph = graph
    try:
        yield
    finally:
        _state.graph = None


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None:
        wait("synchronize")


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        wait("synchronize")


# ---- what torch says of CUDA ----


def allocated() -> int:
    """Bytes below the tensors that are alive."""
    gc.collect()
    storages = (card.inner.untyped_storage() for card in list(_cards))
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


class Nccl:
    """A group of the card's tensors: gloo's, on what they hold. Graphs capture what it does."""

    class Options:
        _timeout = timedelta(seconds=30)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        group: Any = dist.ProcessGroupGloo
        self._group = group(store, rank, size, options._timeout)

    def __getattr__(self, name: str) -> Any:
        called = getattr(self._group, name)
        if name not in ("allreduce", "allgather", "broadcast"):
            return called

        def call(tensors: Any, *rest: Any) -> Any:
            def run() -> None:
                called(*plain).wait()

            assert all(isinstance(x, Card) for x in _tensors((tensors, rest))), name
            plain = _plain((tensors, *rest))
            run()
            record(run, None)
            return Done()

        return call


class Done:
    """Work of a group that is behind us."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Runtime:
    """The calls of libcudart that share memory, by files in place of a device's memory."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[mmap.mmap, Path | None]] = {}

    def allocate(self, nbytes: int) -> int:
        descriptor, name = tempfile.mkstemp(prefix="card-")
        os.truncate(descriptor, nbytes)
        os.close(descriptor)
        return self._map(Path(name), own=True)

    def handle(self, pointer: int) -> bytes:
        path = self._held[pointer][1]
        assert path is not None
        return path.name.encode().ljust(64, b"\0")

    def open(self, handle: bytes) -> int:
        name = handle.rstrip(b"\0").decode()
        return self._map(Path(tempfile.gettempdir(), name), own=False)

    def set_byte(self, pointer: int, value: int) -> None:
        ctypes.memset(pointer, value, 1)

    def close(self, pointer: int) -> None:
        del self._held[pointer]

    def free(self, pointer: int) -> None:
        _, path = self._held.pop(pointer)
        assert path is not None
        path.unlink()

    def _map(self, path: Path, *, own: bool) -> int:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        pointer = ctypes.addressof(ctypes.c_uint8.from_buffer(memory))
        self._held[pointer] = memory, path if own else None
        return pointer


def _as_tensor(make: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.as_tensor``, also of what has a CUDA array interface; that is kept alive."""

    @functools.wraps(make)
    def made(data: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(data, "__cuda_array_interface__", None)
        if found is None or isinstance(data, Tensor):
            return make(data, *args, **kwargs)
        memory: Any = (ctypes.c_uint8 * found["shape"][0]).from_address(found["data"][0])
        memory.owner = data
        return Card(torch.frombuffer(memory, dtype=torch.uint8))

    return made


def _factory(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        keep = pinned if kwargs.pop("pin_memory", False) else lambda x: x
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return keep(make(*args, **kwargs))
        run = functools.partial(make, *_plain(args), **{**kwargs, "device": "cpu"})
        found = run()
        if not make.__name__.startswith("empty"):
            record(run, found)
        return Card(found)

    return made


def _to_host_or_card(name: str) -> None:
    """Methods of ordinary tensors that may name the card, or take one of its tensors."""
    before = getattr(torch.Tensor, name)

    @functools.wraps(before)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, Card):
            return _run(before, (self, *args), kwargs)
        named = [x for x in (*args, *kwargs.values()) if isinstance(x, str | torch.device)]
        if name == "pin_memory":
            return pinned(self.clone())
        if name == "cuda" or any(torch.device(x).type == "cuda" for x in named):
            return _moved(name, (self, *args), kwargs)
        if name == "copy_" and isinstance(args[0], Card):
            return _copied(self, *args, **kwargs)
        if name in ("to", "type_as") and any(isinstance(x, Card) for x in args):
            return _moved(name, (self, *args), kwargs)
        if name.startswith("new_") and any(torch.device(x).type == "cuda" for x in named):
            raise NotImplementedError(name)
        return before(self, *args, **kwargs)

    setattr(torch.Tensor, name, method)


def install() -> None:
    """From now on this process has a card."""
    from triton.runtime.interpreter import GridExecutor

    for name in FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name)))
    torch.as_tensor = _as_tensor(torch.as_tensor)
    for name in ("to", "cuda", "copy_", "pin_memory"):
        _to_host_or_card(name)

    launch = GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        strange = [x for x in args if isinstance(x, Tensor) and not isinstance(x, Card)]
        assert not strange, "a kernel was given a tensor of the host"
        run = functools.partial(launch, self, *_plain(args), **_plain(kwargs))
        run()
        record(run, None)

    GridExecutor.__call__ = launched

    def set_device(device: Any) -> None:
        global DEVICE
        DEVICE = torch.device("cuda", getattr(device, "index", device))

    def properties(device: Any) -> SimpleNamespace:
        index = getattr(device, "index", device)
        found = {"name": "pretended", "uuid": f"{UUID}{index}", "multi_processor_count": 2}
        return SimpleNamespace(**found, total_memory=MEMORY, major=9, minor=0)

    def synchronize(*_: Any) -> None:
        wait("synchronize")

    said: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: CARDS,
        "current_device": lambda: DEVICE.index,
        "set_device": set_device,
        "get_device_name": lambda *_: "pretended",
        "get_device_properties": properties,
        "mem_get_info": lambda *_: (MEMORY - allocated(), MEMORY),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "empty_cache": lambda: None,
        "synchronize": synchronize,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: Stream(),
        "stream": lambda _: nullcontext(),
        "device": lambda _: nullcontext(),
        "CUDAGraph": Graph,
        "graph": capture,
        "graph_pool_handle": object,
    }
    for name, value in said.items():
        setattr(torch.cuda, name, value)

    dist.ProcessGroupNCCL = Nccl  # type: ignore[misc, assignment]

    from rollout.weight_sync.transports import cuda_ipc

    cuda_ipc.Runtime = Runtime  # type: ignore[misc, assignment]
