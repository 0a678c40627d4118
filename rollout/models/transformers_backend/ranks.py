"""Over how many ranks transformers' modules run, and what each of them caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollout.errors import ConfigError
from rollout.models.transformers_backend.probe import Probed, probe_part
from rollout.models.transformers_backend.remote_code import RemoteCode

SIZES = range(2, 9)  # numbers of ranks that are tried to tell which work


@dataclass(frozen=True, slots=True, kw_only=True)
class OverRanks:
    """``whole`` cut by its plan; each number of ranks is tried once, by modules without memory."""

    whole: Probed
    code: RemoteCode | None = None
    _found: dict[int, int | str] = field(default_factory=dict)  # heads of a rank, or why not

    def kv_heads(self, size: int) -> int:
        """The most heads that a layer of each of ``size`` ranks caches; ``ConfigError`` where it
        does not run on so many.
        """
        found = self._try(size)
        if isinstance(found, str):
            sizes = ", ".join(str(each) for each in self.fitting())
            raise ConfigError(
                f"{self.whole.architecture} runs as transformers' modules, and not on {size} "
                f"ranks: {found}. Sizes that work, up to {SIZES[-1]}: {sizes}"
            )
        return found

    def fitting(self) -> list[int]:
        """The numbers of ranks, up to the last of ``SIZES``, on which it runs."""
        return [1, *(n for n in SIZES if not self.why_not(n))]

    def why_not(self, size: int) -> str:
        """Why it does not run on ``size`` ranks; "" where it does."""
        found = self._try(size)
        return found if isinstance(found, str) else ""

    def _try(self, size: int) -> int | str:
        if size == 1:
            return self.whole.num_kv_heads
        if size not in self._found:
            try:
                self._found[size] = self._heads(size)
            except ConfigError as error:
                self._found[size] = str(error)
        return self._found[size]

    def _heads(self, size: int) -> int:
        part = probe_part(self.whole, size, self.code)
        pairs = zip(_layers(self.whole), _layers(part), strict=True)
        for number, ((heads, rest), (here, found)) in enumerate(pairs):
            if found != rest or here not in (heads, _shared(heads, size)):
                raise ConfigError(
                    f"what its attention number {number} keeps, of {_said(heads)} heads, is not "
                    f"cut by heads ({_said(here)} on a rank)"
                )
        return part.num_kv_heads


def _shared(heads: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """Of a rank, each a part of them or a copy of one; None where they do not come out."""
    if any(n % size and size % n for n in heads):
        return None
    return tuple(max(1, n // size) for n in heads)


def _layers(probed: Probed) -> Iterator[tuple[tuple[int, ...], tuple[object, ...]]]:
    """Of each entry of the cache the heads, which ranks share, and what all have alike."""
    for each in probed.kept or ():
        yield (each.heads,), (each.kind, each.dims, each.positions, each.inputs, each.states)
    for heads, kv_heads, dim in probed.calls:
        yield (heads, kv_heads), (dim,)


def _said(heads: tuple[int, ...]) -> str:
    return " and ".join(map(str, heads))
