"""Which transports there are, and which of them an update takes.

To add one: a row in ``MODULES`` and its file, see ``base``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from rollout.errors import ConfigError
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.transports.base import Holding, Transport
from rollout.weight_sync.transports.host import host_id

_HERE = "rollout.weight_sync.transports"

# Name, or name/kind of the engine's device -> module:class. The order is that of preference.
MODULES: dict[str, str] = {
    "reshard/cuda": f"{_HERE}.cuda_reshard:Reshard",
    "p2p": f"{_HERE}.p2p:P2P",
    "broadcast": f"{_HERE}.broadcast:Broadcast",
    "inline": f"{_HERE}.inline:Inline",
    "grpc_stream": f"{_HERE}.inline:GrpcStream",
    "ipc/cpu": f"{_HERE}.shared_memory:SharedMemory",
    "ipc/cuda": f"{_HERE}.cuda_ipc:CudaIpc",
    "foreign": f"{_HERE}.foreign:ForeignTransfer",
}


# What others name transports by -> ours.
_BY_WHAT = {
    "nccl": "broadcast", "gloo": "broadcast", "cuda_ipc": "ipc", "shared_memory": "ipc",
    "grpc": "grpc_stream",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """One transport to try, and why it is this one's turn."""

    transport: Transport
    reason: str


def names() -> tuple[str, ...]:
    """Of all transports, in the order of preference."""
    return tuple(dict.fromkeys(key.split("/")[0] for key in MODULES))


def find(name: str, device: str = "cpu") -> Transport:
    """The transport ``name`` to an engine on ``device``; ``ConfigError`` where there is none."""
    found = _lookup(name, device)
    if found is None and name in names():
        raise ConfigError(f"transport {name!r} does not lead to an engine on {device}")
    if found is None:
        known = (each for each in names() if each in offered() + served(offered()))
        meant = _BY_WHAT.get(name)
        hint = f"; by {name} goes {meant!r}" if meant else ""
        raise ConfigError(f"unknown transport {name!r:.80}{hint}; known: auto, {', '.join(known)}")
    return found


def offered(device: str | None = None) -> tuple[str, ...]:
    """What every engine offers, or every engine on ``device``."""
    found = (name for name in names() if device is None or _lookup(name, device) is not None)
    return tuple(name for name in found if _any(name).offered)


def served(offers: Sequence[str]) -> tuple[str, ...]:
    """The names of what an engine ``offers`` at its service."""
    return tuple(_any(name).served_as or name for name in offers)


def nearest_first(offers: Sequence[str]) -> tuple[str, ...]:
    """What an engine ``offers``, in the order of a trainer in its process."""
    return tuple(sorted(offers, key=lambda name: not _any(name).in_process))


def is_near(info: WeightInfo) -> bool:
    """Whether the engine that announced ``info`` is in this process."""
    first = _lookup(info.transports[0], info.device) if info.transports else None
    return first is not None and first.in_process


def mapping(info: WeightInfo) -> Transport | None:
    """What leads to tensors of all trainer ranks where they lie, if the engine has such a thing."""
    found = (_lookup(name, info.device) for name in info.transports)
    return next((transport for transport in found if transport and transport.maps), None)


def same_host(info: WeightInfo) -> bool:
    """Whether this process shares memory with the engine that announced ``info``."""
    return info.host != "" and info.host == host_id()


def asked(transport: str | Transport, info: WeightInfo) -> Transport | None:
    """What the caller has chosen, None for "auto"."""
    if isinstance(transport, Transport):
        return transport.on(info)
    return None if transport == "auto" else find(transport, info.device)


def ways(
    transport: str | Transport, info: WeightInfo, holding: Holding | None = None
) -> tuple[Way, ...]:
    """What "auto" tries one after the other; one alone where the caller has chosen.

    Preferred ones come first, then the engine's own order. Where all trainer ranks were to send
    and cannot, "auto" decides; any other choice that is not possible is a ``ConfigError``.
    """
    chosen = asked(transport, info)
    if chosen is None:
        return _auto(info, holding)
    why = chosen.why_not(info, holding)
    if why is None:
        return (Way(chosen, "asked for"),)
    if chosen.senders == "one":
        raise ConfigError(f"transport {chosen.name!r} is not possible: {why}; use transport='auto'")
    told = f"no {chosen.name}: {why}; "
    return tuple(
        Way(way.transport, told + way.reason.removeprefix(told)) for way in _auto(info, holding)
    )


def _auto(info: WeightInfo, holding: Holding | None) -> tuple[Way, ...]:
    found: list[Way] = []
    notes: list[str] = []
    for name in names():
        transport = _lookup(name, info.device)
        if transport is None:  # none leads to such a device
            continue
        preference = transport.preference(info, holding)
        if preference is None:
            continue
        why = transport.why_not(info, holding)
        if name not in info.transports:
            why = "the engine does not offer it"
        if why is not None:
            notes.append(f"no {name}: {why}")
            continue
        found.append(Way(transport, "; ".join([*notes, preference])))
        if transport.in_process:
            return tuple(found)
        notes.append(f"{name} failed")
    for name in info.transports:
        transport = _lookup(name, info.device)
        if transport is not None and transport.fallback:
            found.append(Way(transport, "; ".join(notes)))
    return tuple(found)


def _lookup(name: str, device: str) -> Transport | None:
    where = MODULES.get(name) or MODULES.get(f"{name}/{device.split(':')[0]}")
    return None if where is None or "/" in name else _load(where)


def _any(name: str) -> Transport:
    """Whichever has this name: those of one name differ by device alone."""
    return _load(next(at for key, at in MODULES.items() if key.split("/")[0] == name))


def _load(where: str) -> Transport:
    module, _, kind = where.partition(":")
    transport: Transport = getattr(import_module(module), kind)()
    return transport
