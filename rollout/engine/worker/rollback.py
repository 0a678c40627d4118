"""Weights kept in host memory so that a rank's live instance can go back to them.

A parameter is kept in pieces of bounded size; each is either whole or the elements that differ,
whichever is shorter. So what is kept is never larger than one copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rollout.kernels import swap_tensors
from rollout.models.model import Model
from rollout.models.weight_io.patch_journal import CHUNK
from rollout.weights import INTEGERS


@dataclass(slots=True)
class _Piece:
    """Elements ``positions`` of a piece of a parameter, or all of it (None); both on the host."""

    positions: Tensor | None  # [n] int32
    values: Tensor  # [n]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)


class RollbackSnapshot:
    """What makes the weights of one instance into others: ``exchange`` puts it in.

    The same again goes back: the values that it replaces take the place of those that were kept.
    """

    def __init__(self, pieces: list[_Piece]) -> None:
        self._pieces = pieces

    @classmethod
    def whole(cls, model: Model) -> RollbackSnapshot:
        """A copy of everything ``model`` holds."""
        return cls([_Piece(None, _to_host(x)) for x in chunks(model)])

    @classmethod
    def difference(cls, old: Model, new: Model) -> RollbackSnapshot:
        """What makes ``new`` into ``old``: ``old``'s values where their bits differ."""
        return cls([_compared(x, y) for x, y in pairs(old, new)])

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)

    def shrink(self, model: Model) -> None:
        """Forget the elements that ``model`` holds, too; only for what ``whole`` has made."""
        for index, x in enumerate(chunks(model)):
            self._pieces[index] = _compared(self._pieces[index].values, x)

    def exchange(self, model: Model) -> None:
        """Swap what is kept with what ``model`` holds there, and derive again.

        A failure puts back what was exchanged before it, and raises.
        """
        pieces = zip(self._pieces, chunks(model), strict=True)
        all_or_none([partial(_swap, piece, x) for piece, x in pieces], model.after_load)


@dataclass(slots=True)
class KeptVersion:
    """A snapshot that turns one content of the live instance into another, and then back."""

    snapshot: RollbackSnapshot
    leads_to: int | None
    leads_from: int | None

    def is_between(self, here: int | None, there: int | None) -> bool:
        """Whether it leads from ``here`` to ``there``; None is no content."""
        known = here is not None and there is not None
        return known and (self.leads_from, self.leads_to) == (here, there)

    def exchange(self, live: Model) -> None:
        self.snapshot.exchange(live)
        self.leads_to, self.leads_from = self.leads_from, self.leads_to


def exchange(a: Model, b: Model) -> None:
    """Of two instances, all that they hold; both derive again. A failure changes neither."""

    def derive() -> None:
        a.after_load()
        b.after_load()

    all_or_none([partial(swap_tensors, x, y) for x, y in _storages(a, b)], derive)


def all_or_none(exchanges: list[Callable[[], None]], derive: Callable[[], None]) -> None:
    """Run every exchange, then ``derive``; when one fails, those before it are done again.

    An exchange done twice changes nothing, and one that raises has changed nothing.
    """
    done = 0
    try:
        for exchange in exchanges:
            exchange()
            done += 1
        derive()
    except BaseException:
        for exchange in exchanges[:done]:
            exchange()
        if done:
            derive()
        raise


def chunks(model: Model) -> Iterator[Tensor]:
    """The parameters as flat views of bounded size."""
    for parameter in model.parameters():
        yield from torch.split(parameter.data.view(-1), CHUNK)


def pairs(a: Model, b: Model) -> Iterator[tuple[Tensor, Tensor]]:
    """Matching pieces of the two instances' parameters."""
    yield from zip(chunks(a), chunks(b), strict=True)


def _storages(a: Model, b: Model) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole parameters where a kernel exchanges them without a copy, else pieces of them."""
    if not a.build.device.type == b.build.device.type == "cuda":
        yield from pairs(a, b)
        return
    others = dict(b.named_parameters())
    for name, parameter in a.named_parameters():
        yield parameter.data, others[name].data


def _to_host(x: Tensor) -> Tensor:
    return x.to("cpu", copy=True)


def _compared(old: Tensor, new: Tensor) -> _Piece:
    """The piece that makes ``new`` into ``old``, at its shorter."""
    new = new.to(old.device)
    bits = INTEGERS[old.dtype.itemsize]
    positions = (old.view(bits) != new.view(bits)).nonzero().view(-1)
    if len(positions) * (4 + old.dtype.itemsize) >= old.nbytes:
        return _Piece(None, _to_host(old))
    return _Piece(positions.to("cpu", torch.int32), old[positions].cpu())


def _swap(piece: _Piece, x: Tensor) -> None:
    if piece.positions is None:
        held = _to_host(x)
        x.copy_(piece.values)
    else:
        positions = piece.positions.to(x.device, torch.int64)
        held = x[positions].cpu()
        x.index_copy_(0, positions, piece.values.to(x.device))
    piece.values = held
