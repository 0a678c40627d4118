"""Transformers' own cache over our pages and slots, for modules that attend by themselves.

Modules that do not call attention by name still hand keys and values to a ``Cache``, and recurrent
ones their states. A sequence's is one whose layers write to its pages, and give back what lies in
them; states are taken out of its slot before a pass and put back behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.models.forward import ForwardBatch, LayerKV

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one layer of the modules keeps: one entry of the engine's cache.

    "keys" and values of ``heads`` heads and ``dims`` of each; the "index" of its keys, which may
    remember so many ``positions`` of each; "states": shapes of one sequence's ``inputs`` of
    convolutions and of its recurrent ``states``, by number.
    """

    layer: int
    kind: Literal["keys", "index", "states"]
    heads: int = 1
    dims: tuple[int, int] = (0, 0)
    positions: int = 0
    inputs: tuple[tuple[int, Shape], ...] = ()
    states: tuple[tuple[int, Shape], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """Elements of one sequence's states in each layer that has some: those of the largest."""

    inputs: int
    state: int

    @classmethod
    def of(cls, kept: Iterable[Kept]) -> StateSizes | None:
        layers = [each for each in kept if each.kind == "states"]
        if not layers:
            return None
        inputs, states = (
            max(sum(prod(shape) for _, shape in part) for part in parts)
            for parts in ([one.inputs for one in layers], [one.states for one in layers])
        )
        return cls(inputs=inputs, state=states)

    def state_shapes(self, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As of a ``MambaConfig``, flat."""
        return (self.inputs,), (self.state,)


def what_is_kept(cache: Any) -> tuple[Kept, ...]:
    """What modules have put into a cache of transformers' in their first pass, layer by layer."""
    found: list[Kept] = []
    for index, layer in enumerate(cache.layers):
        if (keys := getattr(layer, "keys", None)) is not None:
            if keys.dim() != 4 or layer.values.dim() != 4:
                raise ConfigError("keys and values lie otherwise than as heads of tokens")
            dims = keys.shape[-1], layer.values.shape[-1]
            found.append(Kept(layer=index, kind="keys", heads=keys.shape[1], dims=dims))
        if (keys := getattr(layer, "indexer_keys", None)) is not None:
            places = getattr(layer, "indexer_position_ids", None)  # [positions, 1, T]
            if places is not None and places.dim() != 3:
                raise ConfigError("an index keeps positions otherwise than as rows of them")
            rows = 0 if places is None else places.shape[0]
            found.append(Kept(layer=index, kind="index", dims=(keys.shape[-1], 0), positions=rows))
        if not hasattr(layer, "conv_states"):
            continue
        inputs, states = (
            tuple((i, tuple(x.shape[1:])) for i, x in part.items() if x is not None)
            for part in (layer.conv_states, layer.recurrent_states)
        )
        found.append(Kept(layer=index, kind="states", inputs=inputs, states=states))
    return tuple(found)


class SequenceCache:
    """The cache of sequence ``number`` of a step, over one entry of ``kv`` for each of ``kept``."""

    def __init__(
        self,
        config: Any,
        kept: Sequence[Kept],
        kv: Sequence[LayerKV],
        batch: ForwardBatch,
        number: int,
        tokens: slice,
        past: int,
    ) -> None:
        from transformers import DynamicCache

        self._kept, self._kv, self._past = kept, kv, past
        self._slot = 0 if batch.state_slots is None else int(batch.state_slots[number])
        self.inner = DynamicCache(config=config)
        self.inner.layer_class_to_replicate = None
        for each, entry in zip(kept, kv, strict=True):
            layer = self._layer(each.layer)
            if each.kind == "states":
                if past:
                    self._take_out(each, entry, layer)
                continue
            pages = _Pages(entry, batch, number, tokens, past)
            if each.kind == "keys":
                _page_keys(layer, pages)
            else:
                _page_index(layer, pages)
                if each.positions and past:  # of text, whose positions are where its tokens lie
                    places = torch.arange(past, device=batch.positions.device)
                    layer.indexer_position_ids = places.expand(each.positions, 1, past)

    def put_back(self) -> None:
        """States to their slot, once the pass is over."""
        for each, entry in zip(self._kept, self._kv, strict=True):
            if each.kind != "states":
                continue
            layer = self._layer(each.layer)
            for store, parts, shapes in _states(layer, entry, each):
                for (number, _), place in zip(
                    shapes, _places(store[self._slot], shapes), strict=True
                ):
                    place.copy_(parts[number][0])

    def _take_out(self, each: Kept, entry: LayerKV, layer: Any) -> None:
        for store, parts, shapes in _states(layer, entry, each):
            for (number, _), place in zip(shapes, _places(store[self._slot], shapes), strict=True):
                parts[number] = place[None].clone()
        for number, shape in each.inputs:
            layer.is_conv_states_initialized[number] = True
            layer.conv_kernel_size[number] = shape[-1]
            layer.has_previous_state[number] = True
        for number, _ in each.states:
            layer.is_recurrent_states_initialized[number] = True
            layer.has_previous_state[number] = True
        layer.dtype, layer.device = entry.k.dtype, entry.k.device

    def _layer(self, index: int) -> Any:
        from transformers.cache_utils import DynamicLayer

        while len(self.inner.layers) <= index:
            self.inner.layers.append(DynamicLayer())
        return self.inner.layers[index]


class _Pages:
    """One entry's pages of one sequence."""

    def __init__(
        self, kv: LayerKV, batch: ForwardBatch, number: int, tokens: slice, past: int
    ) -> None:
        self.kv, self.past = kv, past
        self.table = batch.block_tables[number].long()
        self.slots = batch.slot_mapping[tokens]

    def swap(self, new: Tensor, pages: Tensor) -> Tensor:
        """``new`` [1, heads, T, dim] goes to its slots; all of the context [1, heads, C, dim]."""
        _, heads, count, dim = new.shape
        block = pages.shape[2]
        pages[self.slots // block, :heads, self.slots % block, :dim] = (
            new[0].transpose(0, 1).to(pages.dtype)
        )
        total = self.past + count
        used = pages[self.table[: -(-total // block)], :heads, :, :dim]
        whole = used.transpose(0, 1).reshape(heads, -1, dim)
        return whole[None, :, :total].to(new.dtype)


def _page_keys(layer: Any, pages: _Pages) -> None:
    """From now on ``layer`` keeps keys and values in pages."""
    past, kv = pages.past, pages.kv
    done = [past]

    def update(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        done[0] = past + keys.shape[-2]
        return pages.swap(keys, kv.k), pages.swap(values, kv.v)

    layer.update = update
    layer.get_seq_length = lambda: done[0]
    layer.get_mask_sizes = lambda count: (done[0] + int(count), 0)
    layer.is_sliding = False  # nothing is cut off: masks say how far a query sees


def _page_index(layer: Any, pages: _Pages) -> None:
    def update(keys: Tensor) -> Tensor:  # [1, T, dim]
        return pages.swap(keys[:, None], pages.kv.k)[:, 0]

    layer.update_indexer = update


def _states(
    layer: Any, entry: LayerKV, kept: Kept
) -> Iterator[tuple[Tensor, dict[int, Tensor], tuple[tuple[int, Shape], ...]]]:
    """Where both kinds of states lie, in the slots and in the layer, and their shapes."""
    yield entry.k, layer.conv_states, kept.inputs
    yield entry.v, layer.recurrent_states, kept.states


def _places(flat: Tensor, shapes: tuple[tuple[int, Shape], ...]) -> Iterator[Tensor]:
    """Views of a slot, one after the other."""
    at = 0
    for _, shape in shapes:
        count = prod(shape)
        yield flat[at : at + count].view(shape)
        at += count
