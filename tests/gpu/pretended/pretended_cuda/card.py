"""A tensor that says it is on a GPU."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from pretended_cuda import timeline
from pretended_cuda.segments import in_segment
from pretended_cuda.timeline import (
    copy_later,
    current_stream,
    done,
    is_pinned,
    read_later,
    record,
    touches,
    wait,
)

DEVICE = torch.device("cuda", 0)  # the process's own: ``set_device`` sets it
#: take indices on the host as well as on the device
INDEXED = {"__getitem__", "__setitem__", "index_put_", "index_put", "index"}
#: wait for the device, or have a shape that depends on values
WAITS = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique"),
    *("masked_select", "equal", "allclose", "is_nonzero", "bincount", "repeat_interleave"),
}
#: say something of a tensor and run nothing
DESCRIBE = {
    *("size", "stride", "dim", "numel", "element_size", "data_ptr", "is_contiguous"),
    *("__len__", "untyped_storage", "storage_offset", "is_floating_point", "type", "nelement"),
    *("is_pinned", "is_complex", "is_inference", "__hash__", "__format__"),
}
DIVIDES = {"div", "divide", "true_divide", "__truediv__"}
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
        return run_on_card(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was not seen as a call of torch's")

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"Card({self.inner!r})"


def run_on_card(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    if name in ("__get__", "__set__"):
        return _attribute(func, name, args)
    if name in ("to", "cpu", "cuda"):
        return moved(name, args, kwargs)
    if name in ("numpy", "__array__"):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    if name == "pin_memory":
        raise RuntimeError("cannot pin memory of a device")
    if name == "get_device":
        return DEVICE.index
    if name == "_has_compatible_shallow_copy_type":
        return False  # ``Module.cuda()`` makes new parameters then
    if name == "copy_":
        return copied(*args, **kwargs)
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
        return func(*plain_of(args), **plain_of(kwargs))  # new_empty(device="cpu") and such
    if name not in DESCRIBE:
        _check_devices(name, args, kwargs)
    kwargs = {key: value for key, value in kwargs.items() if key != "device"}
    if name in DIVIDES and not kwargs and _is_number(args[1]) and args[0].is_floating_point():
        func, args = _times_inverse, (args[0], float(args[1]))
    plain_args, plain_kwargs = plain_of(args), plain_of(kwargs)
    run: Any = functools.partial(func, *plain_args, **plain_kwargs)
    if name not in DESCRIBE:
        run = done(run)
    found = run()
    if name in WAITS and not (name == "repeat_interleave" and _is_number([*args, args[0]][1])):
        wait(name)
    if name not in DESCRIBE:
        record(run, found)
    # What was changed in place comes back as it is.
    before = {id(x.inner): x for x in all_tensors((args, kwargs)) if isinstance(x, Card)}
    return tree_map(lambda x: before[id(x)] if id(x) in before else wrapped(x), found)


def _is_number(value: Any) -> bool:
    """Of the host: also in a tensor."""
    return not isinstance(value, Card) and (not isinstance(value, Tensor) or not value.dim())


def _times_inverse(values: Tensor, number: float) -> Tensor:
    """As torch's kernel divides by a number of the host."""
    wide = values.double() if values.dtype == torch.float64 else values.float()
    return (wide * (1 / wide.new_full((), number))).to(values.dtype)


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
    return wrapped(value)


def moved(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``to``, ``cpu`` and ``cuda`` of a tensor anywhere."""
    current_stream().catch_up()
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
    run: Any
    if target.type == here.type:
        run = done(functools.partial(plain.to, dtype or plain.dtype))
    else:
        run = functools.partial(_fresh, plain, dtype or plain.dtype, on_card=target.type != "cpu")
    found = run()
    if target.type != here.type:
        there = [plain] if target.type == "cpu" else []
        touches("a copy", there, [] if there else [found], new=True)
        if target.type != "cpu" and kwargs.get("non_blocking"):
            read_later(plain)
        else:
            wait("a copy to the host or from there")
    record(run, found)
    if found is plain:
        return source
    return found if target.type == "cpu" else wrapped(found)


def _fresh(plain: Tensor, dtype: torch.dtype, *, on_card: bool) -> Tensor:
    plain = plain.detach()
    if on_card and plain.numel() and plain.is_contiguous():
        return in_segment(plain.to(dtype))
    return plain.to(dtype, copy=True)


def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    current_stream().catch_up()
    a, b = (x.inner if isinstance(x, Card) else x for x in (target, source))
    if isinstance(target, Card) and isinstance(source, Card):
        run = done(functools.partial(a.copy_, b))
        run()
        record(run, a)
        return target
    if isinstance(target, Card):
        _copy_from_host(a, b)
        record(functools.partial(_copy_from_host, a, b), a)
        if non_blocking:
            read_later(b)
        else:
            wait("a copy from the host")
        return target
    touches("a copy to the host", [b], [])
    if non_blocking and is_pinned(a):
        copy_later(a, b)
    else:
        wait("a copy to the host")
        a.copy_(b)
    return target


def _copy_from_host(target: Tensor, source: Tensor) -> None:
    touches("a copy from the host", [], [target])
    target.copy_(source)


def _check_devices(name: str, args: Any, kwargs: Any) -> None:
    found = all_tensors((args, kwargs))
    if name in INDEXED and isinstance(args[0], Card):
        values = args[2:] if name == "__setitem__" else ()
        found = [args[0], *(x for x in values if isinstance(x, Tensor))]
        if name == "__setitem__" and not all_tensors(args[1]):
            return  # a copy into a part of it
    strange = [x for x in found if not isinstance(x, Card) and x.dim() > 0]
    if strange:
        raise RuntimeError(
            f"{name}: Expected all tensors to be on the same device, but found at least two "
            f"devices, cuda:0 and cpu! (shapes {[tuple(x.shape) for x in strange]} on the cpu)"
        )


def all_tensors(tree: Any) -> list[Any]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


def plain_of(tree: Any) -> Any:
    return tree_map(lambda x: x.inner if isinstance(x, Card) else x, tree)


def wrapped(tree: Any) -> Any:
    return tree_map(lambda x: Card(x) if isinstance(x, Tensor) else x, tree)


def set_device(device: Any) -> None:
    global DEVICE
    DEVICE = torch.device("cuda", getattr(device, "index", device))
    timeline.set_device(DEVICE.index)


def allocated() -> int:
    """Bytes below the tensors that are alive."""
    gc.collect()
    storages = (card.inner.untyped_storage() for card in list(_cards))
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())
