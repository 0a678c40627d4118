"""Puts the pretended device in the place of what torch says of CUDA."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from quick_interpreter import quicken
from torch import Tensor

from pretended_cuda.card import (
    Card,
    allocated,
    copied,
    moved,
    plain_of,
    run_on_card,
    set_device,
)
from pretended_cuda.order import Places, look_at_kernels, looking
from pretended_cuda.sharing import Nccl, Runtime
from pretended_cuda.timeline import (
    Event,
    Graph,
    Pool,
    Stream,
    capture,
    captures,
    current_device,
    current_stream,
    default_stream,
    done,
    launched,
    on_device,
    on_stream,
    pinned,
    record,
    refuse_other_device,
    set_stream,
    synchronize,
    wait,
)

MEMORY = 4 << 30
CARDS = 2
UUID = "GPU-5e1f0000-0000-4000-8000-00000000ca4"  # and the card's number
FACTORIES = (
    *("empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "rand", "randn"),
    *("randint", "randperm", "linspace", "empty_strided", "eye"),
)


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
        if torch.device(device).index is None:
            refuse_other_device(make.__name__)
        if make.__name__ in ("tensor", "as_tensor"):
            wait("a copy from the host")
        run = done(functools.partial(make, *plain_of(args), **{**kwargs, "device": "cpu"}))
        found = run()
        if not make.__name__.startswith("empty"):
            record(run, found)
        elif captures():
            found.zero_()  # what no kernel writes now: torch may look up by it
        return Card(found)

    return made


def _to_host_or_card(name: str) -> None:
    """Methods of ordinary tensors that may name the card, or take one of its tensors."""
    before = getattr(torch.Tensor, name)

    @functools.wraps(before)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, Card):
            return run_on_card(before, (self, *args), kwargs)
        named = [x for x in (*args, *kwargs.values()) if isinstance(x, str | torch.device)]
        if name == "pin_memory":
            return pinned(self.clone())
        if name == "cuda" or any(torch.device(x).type == "cuda" for x in named):
            return moved(name, (self, *args), kwargs)
        if name == "copy_" and isinstance(args[0], Card):
            return copied(self, *args, **kwargs)
        if name == "to" and any(isinstance(x, Card) for x in args):
            return moved(name, (self, *args), kwargs)
        return before(self, *args, **kwargs)

    setattr(torch.Tensor, name, method)


def _launch_on_cards() -> None:
    """Triton's interpreter takes tensors of a card, and no others."""
    from triton.runtime.interpreter import GridExecutor

    quicken()
    launch = GridExecutor.__call__
    turn = threading.Lock()  # the interpreter patches its modules for as long as a kernel runs

    def one_by_one(*args: Any, **kwargs: Any) -> Places:
        with turn, looking() as places:
            launch(*args, **kwargs)
        return places

    def launch_on_card(self: Any, *args: Any, **kwargs: Any) -> None:
        current_stream().catch_up()
        strange = [x for x in args if isinstance(x, Tensor) and not isinstance(x, Card)]
        assert not strange, "a kernel was given a tensor of the host"
        refuse_other_device(self.fn.__name__)
        ran = functools.partial(one_by_one, self, *plain_of(args), **plain_of(kwargs))
        run = launched(ran, self.fn.__name__)
        if not captures():  # a capture runs nothing; what torch does then needs shapes alone
            run()
        record(run, None)

    GridExecutor.__call__ = launch_on_card
    look_at_kernels()


def install() -> None:
    """From now on this process has cards, those of ``CUDA_VISIBLE_DEVICES`` where it is set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(CARDS)))
    visible = [int(index) for index in visible.split(",")]
    for name in FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name)))
    torch.as_tensor = _as_tensor(torch.as_tensor)
    for name in ("to", "cuda", "copy_", "pin_memory"):
        _to_host_or_card(name)
    _launch_on_cards()

    def properties(device: Any) -> SimpleNamespace:
        index = getattr(device, "index", device)
        uuid = f"{UUID}{visible[index]}"
        found = {"name": "pretended", "uuid": uuid, "multi_processor_count": 2}
        return SimpleNamespace(**found, total_memory=MEMORY, major=9, minor=0)

    said: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: len(visible),
        "current_device": current_device,
        "set_device": set_device,
        "get_device_name": lambda *_: "pretended",
        "get_device_properties": properties,
        "can_device_access_peer": lambda a, b: True,
        "mem_get_info": lambda *_: (MEMORY - allocated(), MEMORY),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "empty_cache": lambda: None,
        "synchronize": synchronize,
        "Stream": Stream,
        "Event": Event,
        "is_initialized": lambda: True,
        "manual_seed_all": lambda _: None,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "stream": on_stream,
        "set_stream": set_stream,
        "device": on_device,
        "CUDAGraph": Graph,
        "graph": capture,
        "graph_pool_handle": Pool,
    }
    for name, value in said.items():
        setattr(torch.cuda, name, value)

    dist.ProcessGroupNCCL = Nccl  # type: ignore[misc, assignment]

    from rollout.weight_sync.transports import cuda_memory

    cuda_memory.Runtime = Runtime  # type: ignore[misc, assignment]
