"""An iterable or generator of (name, tensor): what comes is known only as it comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rollout.errors import SourceFailed, WeightMismatch
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.base import none_is_taken
from rollout.weight_sync.trainer.sources.codes import with_codes
from rollout.weight_sync.trainer.sources.names import Naming
from rollout.weight_sync.trainer.sources.pairs import pair_of
from rollout.weight_sync.trainer.sources.values import is_dtensor, readable
from rollout.weights import Box, TensorMeta


class IterableSource:
    """The caller's stream, checked item by item; iterated once, by the calling rank alone.

    Whatever the iterable raises arrives as ``SourceFailed`` with that exception as ``__cause__``.
    """

    def __init__(self, items: Iterable[Any], naming: Naming, agreement: RankGroup) -> None:
        self._items, self._naming, self.agreement = items, naming, agreement

    def metadata(self) -> None:
        return None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        count, came = 0, list[str]()
        bound = self._naming.bind_stream(_checked(self._items, came))
        for name, tensor in with_codes(bound, self._naming):
            count += 1
            yield name, tensor.to(self._naming.dtype_of(name, tensor.dtype))
        if not count and came:
            raise none_is_taken("the iterable", came)
        if not count:
            raise SourceFailed("the iterable yielded no tensor; was the generator used up before?")

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return []  # unknown before it runs


class CodesSource(IterableSource):
    """A dict's, list's or module's tensors of one process, codes among them; see ``with_codes``."""

    def __init__(
        self, items: list[tuple[str, Tensor]], naming: Naming, agreement: RankGroup
    ) -> None:
        super().__init__(items, naming, agreement)
        held = ((name, torch.empty_like(tensor, device="meta")) for name, tensor in items)
        self._metadata = tuple(
            TensorMeta(name, naming.dtype_of(name, tensor.dtype), tuple(tensor.shape))
            for name, tensor in with_codes(naming.bind_stream(held), naming)
        )

    def metadata(self) -> tuple[TensorMeta, ...]:  # type: ignore[override]
        return self._metadata


def _alone(name: str, tensor: Any) -> Tensor:
    """``tensor``, and of a DTensor that no other rank has a part of, its values."""
    if not is_dtensor(tensor):
        return tensor  # type: ignore[no-any-return]
    if tensor.device_mesh.size() > 1:
        raise WeightMismatch(
            f"{name} is a DTensor, but the iterable began with a plain tensor; pass a dict, a list "
            "or the module, so that all ranks gather it together"
        )
    return tensor.full_tensor()  # type: ignore[no-any-return]


def _checked(items: Iterable[Any], came: list[str]) -> Iterator[tuple[str, Tensor]]:
    """``came`` takes the names."""
    last = ""
    try:
        for item in items:
            name, tensor = pair_of(item, f"after {last}: " if last else "at the start: ")
            last = repr(name)
            came.append(name)
            yield name, readable(name, _alone(name, tensor))
    except (SourceFailed, WeightMismatch):
        raise
    except Exception as error:
        raise SourceFailed(
            f"the iterable raised at {last or 'the first tensor'}: {type(error).__name__}: {error}"
        ) from error
