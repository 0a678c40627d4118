"""Names of a trainer's parameters, bound to those that the engine knows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from rollout.errors import WeightMismatch
from rollout.weight_sync.trainer.sources.pairs import pair_of
from rollout.weights import CASTABLE
from rollout.weights.names import file_form, is_weight, weight_dtype
from rollout.weights.quantization import Scheme

# From a trainer's name to the one a tensor is sent under; None where it is not sent.
NameOf = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Naming:
    """What the engine knows a trainer's tensors as: their names, and what they travel as.

    ``aliases``: from names that may be sent to the tensor that owns them. ``dtype``: of plain
    floats; None: as they are held. ``schemes``: of the tensors that the engine holds quantised, and
    takes the codes of. ``known``: every name that it wants, in file form.
    """

    aliases: Mapping[str, str]
    dtype: torch.dtype | None
    name_of: NameOf = file_form
    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    known: Collection[str] = ()

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """What a tensor of ``dtype`` travels as, under the name that it is sent by."""
        return wire_dtype(name, dtype, self.dtype)

    def wants(self, raw: str) -> bool:
        """Whether the engine holds a tensor of its own under that name."""
        return self.name_of(raw) in self.known

    def bind(self, items: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return bind(items, self.aliases, self.name_of)

    def bind_stream(self, items: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return bind_stream(items, self.aliases, self.name_of)


def submodules(module: nn.Module) -> list[nn.Module]:
    """``module`` and all beneath it, each once: what ``modules()`` yields."""
    return [part for _, part in _beneath(module)]


def _beneath(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """What ``named_modules()`` yields, in a fraction of its time, as it hands each one up through
    all that it lies in.
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    left: list[tuple[str, nn.Module | None]] = [("", module)]
    while left:
        prefix, part = left.pop()
        if part is not None and id(part) not in found:
            found[id(part)] = prefix, part
            if beneath := part._modules:
                before = f"{prefix}." if prefix else ""
                left += [(before + name, one) for name, one in reversed(beneath.items())]
    return found.values()


def bind(
    items: Iterable[tuple[str, Tensor]],
    aliases: Mapping[str, str],
    name_of: NameOf = file_form,
) -> dict[str, Tensor]:
    """File name -> tensor, each weight once, in the order of ``items``.

    An alias whose owner is absent goes under the owner's name; one that shares its owner's storage
    is left out; one that does not is kept, and the engine compares the two. Raises
    ``WeightMismatch`` when two different tensors reduce to one name.
    """
    named: dict[str, Tensor] = {}
    for raw, tensor in items:
        name = name_of(raw)
        if name is None or not is_weight(name):
            continue
        if name in named and not same_storage(named[name], tensor):
            raise WeightMismatch(
                f"two different tensors are both named {name!r} (the second one was {raw!r}); "
                "send one of them"
            )
        named.setdefault(name, tensor)
    bound: dict[str, Tensor] = {}
    for name, tensor in named.items():
        owner = aliases.get(name)
        if owner is not None and owner in named and same_storage(named[owner], tensor):
            continue
        if owner is not None and owner not in named:
            if owner in bound and same_storage(bound[owner], tensor):
                continue
            name = name if owner in bound else owner
        bound[name] = tensor
    return bound


def bind_stream(
    items: Iterable[tuple[str, Tensor]],
    aliases: Mapping[str, str],
    name_of: NameOf = file_form,
) -> Iterator[tuple[str, Tensor]]:
    """``bind`` for a stream whose end is not known: yields as items come.

    An alias that comes before its owner is held (one copy) until the owner comes, or goes under
    the owner's name at the end.
    """
    seen: set[str] = set()
    held: dict[str, Tensor] = {}
    for raw, tensor in items:
        name = name_of(raw)
        if name is None or not is_weight(name):
            continue
        owner = aliases.get(name)
        if owner is not None and owner not in seen:
            held[name] = tensor.detach().clone()
            continue
        seen.add(name)
        yield name, tensor
        for alias in [a for a in held if aliases[a] == name]:
            yield alias, held.pop(alias)
    for alias, tensor in held.items():
        owner = aliases[alias]
        yield (alias if owner in seen else owner), tensor
        seen.add(owner)


Pairs = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def pairs(weights: Pairs) -> list[tuple[str, Tensor]]:
    """What a dict or a list holds, if it is names and tensors."""
    return [*map(pair_of, weights.items() if isinstance(weights, Mapping) else weights)]


def held_by(
    weights: nn.Module | Pairs, wants: Callable[[str], bool] = lambda name: False
) -> list[tuple[str, Tensor]]:
    """The tensors of a module (``named_weights``), a dict or a list, by name."""
    return named_weights(weights, wants) if isinstance(weights, nn.Module) else pairs(weights)


def named_weights(
    module: nn.Module, wants: Callable[[str], bool] = lambda name: False
) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers in model order; local, no copies.

    A shared tensor comes under its first name, and under each further one that the engine
    ``wants``, as one that does not tie what the trainer ties.
    """
    found: list[tuple[str, Tensor]] = []
    seen: set[int] = set()
    is_plain = type(module).named_modules is nn.Module.named_modules
    for prefix, owner in _beneath(module) if is_plain else module.named_modules():
        transient = owner._non_persistent_buffers_set
        for name, tensor in _own(owner, prefix):
            if transient and name.rsplit(".", 1)[-1] in transient:
                continue
            if id(tensor) in seen and not wants(name):
                continue
            seen.add(id(tensor))
            found.append((name, tensor))
    return found


def _own(owner: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters and buffers, as ``named_parameters`` and ``named_buffers`` do."""
    kind = type(owner)
    if kind.named_parameters is not nn.Module.named_parameters or (
        kind.named_buffers is not nn.Module.named_buffers
    ):
        yield from owner.named_parameters(prefix, recurse=False)
        yield from owner.named_buffers(prefix, recurse=False)
        return
    for held in (owner._parameters, owner._buffers):
        for name, tensor in held.items():
            if tensor is not None:
                yield (f"{prefix}.{name}" if prefix else name), tensor


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one: the same object, or the same view of the same memory."""
    if a is b:
        return True
    if _placed(a) != _placed(b):
        return False
    # A DTensor's own part tells; it may be empty, on some ranks alone, so that no address would.
    a, b = (getattr(tensor, "_local_tensor", tensor) for tensor in (a, b))
    plain = (torch.Tensor, nn.Parameter)
    return (
        type(a) in plain
        and type(b) in plain
        and (a.device, a.dtype, a.shape, a.stride()) == (b.device, b.dtype, b.shape, b.stride())
        and a.storage_offset() == b.storage_offset()
        and a.layout == b.layout == torch.strided
        and a.untyped_storage()._cdata == b.untyped_storage()._cdata
    )


def _placed(tensor: Tensor) -> Any:
    """How a DTensor lies on its mesh, None for any other tensor."""
    spec = getattr(tensor, "_spec", None)
    return None if spec is None else (spec.mesh, spec.placements, tuple(tensor.shape))


@lru_cache(maxsize=1 << 16)  # every update asks for the same names
def wire_dtype(name: str, dtype: torch.dtype, target: torch.dtype | None) -> torch.dtype:
    """What a tensor of ``dtype`` travels as: ``target`` (if any) for plain floats, else itself.

    The few whose ``name`` asks for more bits have them; see ``rollout.weights.names``.
    """
    return weight_dtype(name, target) if target is not None and dtype in CASTABLE else dtype
