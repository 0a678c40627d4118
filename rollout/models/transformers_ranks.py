"""Over how many ranks transformers' modules run, and what each of them caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollout.errors import ConfigError
from rollout.models.remote_code import RemoteCode
from rollout.models.transformers_probe import Probed, probe_part

SIZES = (8, 4, 2)  # numbers of ranks that are tried to tell the most
CUT, KEYS = "colwise", {"k_proj", "v_proj", "qkv_proj", "query_key_value"}


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
            others = [str(n) for n in SIZES if n < size and isinstance(self._try(n), int)]
            raise ConfigError(
                f"{self.whole.architecture} runs as transformers' modules, and not on {size} "
                f"ranks: {found}; use tensor_parallel_size={' or '.join([*others, '1'])}"
            )
        return found

    def most(self) -> tuple[int, str]:
        """The most of ``SIZES`` ranks on which it runs, and why not on twice as many."""
        why = ""
        for size in SIZES:
            found = self._try(size)
            if isinstance(found, int):
                return size, why
            why = found
        return 1, why

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
        cuts = {name.rpartition(".")[2] for name, kind in self.whole.plan.items() if kind == CUT}
        for _, kv_heads, _ in self.whole.calls if cuts & KEYS else ():
            if kv_heads % size:
                raise ConfigError(f"{kv_heads} heads of keys and values do not divide over them")
        part = probe_part(self.whole, size, self.code)
        pairs = zip(_layers(self.whole), _layers(part), strict=True)
        for number, ((heads, rest), (here, found)) in enumerate(pairs):
            if found != rest or (here != heads and tuple(n * size for n in here) != heads):
                raise ConfigError(
                    f"what its attention number {number} keeps, of {_said(heads)} heads, is not "
                    f"cut by heads ({_said(here)} on a rank)"
                )
        return part.num_kv_heads


def _layers(probed: Probed) -> Iterator[tuple[tuple[int, ...], tuple[object, ...]]]:
    """Of each entry of the cache the heads, which ranks share, and what all have alike."""
    for each in probed.kept or ():
        yield (each.heads,), (each.kind, each.dims, each.positions, each.inputs, each.states)
    for heads, kv_heads, dim in probed.calls:
        yield (heads, kv_heads), (dim,)


def _said(heads: tuple[int, ...]) -> str:
    return " and ".join(map(str, heads))
