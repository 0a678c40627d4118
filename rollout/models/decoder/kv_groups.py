"""Which layers keep the same positions: a group of them shares pages of the KV cache.

Source of the scheme: hybrid KV groups as in vLLM. A layer with a window never reads what lies
before it again, so the pages of its group can go while those of the full layers stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rollout.models.config.model import ModelConfig

MOST_GROUPS = 16  # each is one more block table of every step
MOST_PADDING = 7  # at most one in so many layers of the pages is empty


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """``layers`` that attend equally far back: to the last ``window`` positions, to those since a
    multiple of ``chunk``, or where both are 0 to all.
    """

    layers: tuple[int, ...]
    window: int = 0
    chunk: int = 0

    @property
    def forgets(self) -> bool:
        """Whether any position is ever out of reach."""
        return bool(self.window or self.chunk)

    def first(self, position: int) -> int:
        """The first position that a query at ``position`` or behind it may still read."""
        if self.chunk:
            return position // self.chunk * self.chunk
        return max(0, position + 1 - self.window) if self.window else 0

    def reach(self, lengths: Tensor) -> int:
        """How many positions the last one of each of ``lengths`` attends to, in all."""
        if self.chunk:
            return int(((lengths - 1) % self.chunk + 1).sum())
        return int((lengths.clamp(max=self.window) if self.window else lengths).sum())

    def blocks(self, tokens: int, ahead: int, size: int) -> int:
        """The most blocks of ``size`` that a sequence of ``tokens`` holds at a time, if a step
        computes up to ``ahead`` of them.
        """
        whole = -(-tokens // size)
        if not self.forgets:
            return whole
        # One more at either end, of which a part is in use; one position for a step begun ahead.
        return min(whole, -(-((self.window or self.chunk) + ahead) // size) + 1)


def kv_groups(config: ModelConfig) -> tuple[KVGroup, ...]:
    """Of the layers that have pages; those that keep every position come last.

    All groups have as many layers (some of the last of a kind may lack a few), so that a page of
    any fits any. A model has one group, of all layers, if they reach equally far; and one that
    keeps every position if it has states or latents beside, is transformers' own, has experts
    whose numbers are kept with each position but no layer that keeps it, or if too much of the
    pages would be empty.
    """
    layers = config.paged_layers
    whole = (KVGroup(layers=layers),)
    if config.latent is not None or config.recurrent_layers or config.hf_values is not None:
        return whole
    kinds: dict[tuple[int, int], list[int]] = {}
    for layer in layers:
        kinds.setdefault(_reach(config, layer), []).append(layer)
    if not kinds or (config.moe is not None and (0, 0) not in kinds):
        return whole
    size = _layers_of_a_page([len(each) for each in kinds.values()])
    if not size:
        return whole
    return tuple(
        KVGroup(layers=tuple(each[start : start + size]), window=window, chunk=chunk)
        for (window, chunk), each in sorted(kinds.items(), reverse=True)
        for start in range(0, len(each), size)
    )


def blocks_of_sequence(groups: Sequence[KVGroup], tokens: int, ahead: int, size: int) -> int:
    """``KVGroup.blocks`` of all of them."""
    return sum(group.blocks(tokens, ahead, size) for group in groups)


def groups_told(told: Sequence[Sequence[int]]) -> tuple[KVGroup, ...]:
    """Of ``[layers, window, chunk]`` of each, as a rank tells them: their layers but counted."""
    return tuple(KVGroup(layers=(0,) * n, window=w, chunk=c) for n, w, c in told)


def _reach(config: ModelConfig, layer: int) -> tuple[int, int]:
    """Window and chunk of a layer; 0 where no sequence is as long."""
    of, longest = config.layers[layer], config.max_position_embeddings
    return of.window if of.window < longest else 0, of.chunk if of.chunk < longest else 0


def _layers_of_a_page(counts: Sequence[int]) -> int:
    """How many layers a page holds, for kinds of so many each; 0: it is not worth it.

    As many as the kind with the fewest has, unless too much would be empty, or groups too many.
    """
    least, total = min(counts), sum(counts)
    sizes: list[int] = [*range(least, 0, -1), *range(least + 1, max(counts) + 1)]
    for size in sizes:
        groups = sum(-(-count // size) for count in counts)
        if groups <= MOST_GROUPS and (groups * size - total) * MOST_PADDING <= total:
            return size
    return 0
