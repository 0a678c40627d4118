"""An op: a plain-torch function that is its own specification, and faster ones beside it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

from torch import Tensor

from rollout.kernels.gpu_support import triton_runs
from rollout.kernels.native import library

P = ParamSpec("P")
R = TypeVar("R")
Watch = Callable[[str, Callable[..., Any]], Callable[..., Any]]  # (op's name, what runs) -> same

_ops: weakref.WeakSet[Op[..., Any]] = weakref.WeakSet()
_watch: Watch | None = None


def watch_ops(watch: Watch | None) -> None:
    """Put ``watch(name, implementation)`` in the place of what every op runs; None ends it.

    It is asked once for each op and device, when that op is next called: nothing is tested per
    call, so ops cost the same as ever while nobody watches. For this process; not thread-safe.
    """
    global _watch
    _watch = watch
    for each in _ops:
        each._by_device.clear()


def are_watched() -> bool:
    """Whether somebody watches: what calls native code past the ops must then call the ops."""
    return _watch is not None


class Op(Generic[P, R]):
    """Calls the implementation for the device of the first argument; same signature for all.

    The decorated function is the implementation called ``reference``. A module beside it, named
    after a device (``<op>/cpu.py`` native, ``<op>/gpu.py`` Triton), may offer another one under the
    op's name; it is imported at the first call on that device. ``implementation(name)`` pins one,
    for tests and for callers who need the same arithmetic on every machine.
    """

    def __init__(self, reference: Callable[P, R]) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.name = reference.__name__
        self._package = reference.__module__
        self._by_device: dict[str, Callable[P, R]] = {}
        _ops.add(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            device = cast(Tensor, args[0]).device.type
        except AttributeError:
            device = cast("Sequence[Tensor]", args[0])[0].device.type
        run = self._by_device.get(device)
        if run is None:
            run = self._find(device) or self.reference
            run = self._by_device[device] = run if _watch is None else _watch(self.name, run)
        return run(*args, **kwargs)

    def implementations(self) -> dict[str, Callable[P, R]]:
        """Those that can run on this machine, by name; ``reference`` comes first."""
        found = {"reference": self.reference}
        if native := self._find("cpu"):
            found["cpu"] = native
        if kernel := self._find("cuda"):
            found["triton"] = kernel
        return found

    def implementation(self, name: str) -> Callable[P, R]:
        """The implementation of that name; a ``KeyError`` where this machine cannot run it."""
        return self.implementations()[name]

    def _find(self, device: str) -> Callable[P, R] | None:
        on_gpu = device == "cuda"
        module = f"{self._package}.{'gpu' if on_gpu else device}"
        if importlib.util.find_spec(module) is None:
            return None
        if not (triton_runs() if on_gpu else library() is not None):
            return None
        return cast("Callable[P, R]", getattr(importlib.import_module(module), self.name))


def op(reference: Callable[P, R]) -> Op[P, R]:
    """Make ``reference`` an op; its first argument, a tensor or several, names the device."""
    return Op(reference)


def in_rows(x: Tensor) -> Tensor:
    """x [tokens, heads, dim] with whole rows, any distance apart; a copy where it has none."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
