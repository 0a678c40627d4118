"""Transformers' own cache over our pages and slots, for modules that attend by themselves.

Modules that do not call attention by name still hand keys and values to a ``Cache``, and recurrent
ones their states. That of a pass is one whose layers write to its sequences' pages, and give back
what lies in them; states are taken out of their slots before a pass and put back behind it.
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
from rollout.models.transformers_backend.passes import Pass

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


class PassCache:
    """The cache of the sequences of one pass, over one entry of ``kv`` for each of ``kept``."""

    def __init__(
        self,
        config: Any,
        kept: Sequence[Kept],
        kv: Sequence[LayerKV],
        batch: ForwardBatch,
        one: Pass,
    ) -> None:
        from transformers import DynamicCache

        self._kept, self._kv = kept, kv
        numbers = torch.tensor(one.sequences, device=batch.positions.device)
        # Where there are none, nothing asks.
        self._slots = numbers if batch.state_slots is None else batch.state_slots[numbers].long()
        self.inner = DynamicCache(config=config)
        self.inner.layer_class_to_replicate = None
        pages = _Pages(batch, one, numbers)
        self.mask = pages.mask  # [sequences, context] int64: 0 where a shorter one is padded
        for each, entry in zip(kept, kv, strict=True):
            layer = self._layer(each.layer)
            if each.kind == "states":
                if any(one.past):
                    self._take_out(each, entry, layer)
            elif each.kind == "keys":
                _page_keys(layer, pages, entry)
            else:
                _page_index(layer, pages, entry)
                if each.positions and pages.past:  # of text: where its tokens lie
                    places = pages.places[:, : pages.past]
                    layer.indexer_position_ids = places.expand(each.positions, *places.shape)

    def put_back(self) -> None:
        """States to their slots, once the pass is over."""
        for each, entry in zip(self._kept, self._kv, strict=True):
            if each.kind != "states":
                continue
            for store, parts, shapes in _states(self._layer(each.layer), entry, each):
                for number, shape, columns in _columns(shapes):
                    place = store[:, columns]
                    place.index_copy_(
                        0, self._slots, parts[number].reshape(-1, prod(shape)).to(store.dtype)
                    )

    def _take_out(self, each: Kept, entry: LayerKV, layer: Any) -> None:
        for store, parts, shapes in _states(layer, entry, each):
            held = store.index_select(0, self._slots)
            for number, shape, columns in _columns(shapes):
                parts[number] = held[:, columns].reshape(-1, *shape).contiguous()
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
    """Where the contexts of a pass lie, each padded at the left with its own first token."""

    def __init__(self, batch: ForwardBatch, one: Pass, numbers: Tensor) -> None:
        device, padding = batch.positions.device, one.padding
        self.past = max(one.past)
        places = torch.arange(one.context, device=device)[None]
        self.mask: Tensor | None = None
        if padding is not None:
            places = places - padding[:, None]
            self.mask, places = (places >= 0).long(), places.clamp(min=0)
        self.places = places.expand(len(numbers), -1)  # [sequences, context]
        self._tables, self._new = batch.block_tables[numbers].long(), batch.slot_mapping[one.tokens]
        self._rows: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def swap(self, new: Tensor, pages: Tensor) -> Tensor:
        """``new`` [sequences, heads, T, dim] goes to its slots; all of the contexts, like it."""
        count, heads, _, dim = new.shape
        used, written = self._lines(heads, pages.shape[1], pages.shape[2])
        lines = pages.view(-1, pages.shape[3])
        lines[:, :dim].index_copy_(0, written, new.reshape(-1, dim).to(pages.dtype))
        found = lines.index_select(0, used).view(count, heads, -1, pages.shape[3])
        return found[..., :dim].to(new.dtype)

    def _lines(self, heads: int, most: int, block: int) -> tuple[Tensor, Tensor]:
        """Rows of pages as [blocks x most x block, dim]: of the contexts, of the new tokens."""
        key = heads, most, block
        if key not in self._rows:
            slots = self._tables.gather(1, self.places // block) * block + self.places % block
            head = torch.arange(heads, device=slots.device)[:, None] * block
            self._rows[key] = tuple(  # type: ignore[assignment]
                (head + (each // block * most * block + each % block)[:, None]).flatten()
                for each in (slots, self._new)
            )
        return self._rows[key]


def _page_keys(layer: Any, pages: _Pages, kv: LayerKV) -> None:
    """From now on ``layer`` keeps keys and values in pages."""
    done = [pages.past]

    def update(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        done[0] = pages.past + keys.shape[-2]
        return pages.swap(keys, kv.k), pages.swap(values, kv.v)

    layer.update = update
    layer.get_seq_length = lambda: done[0]
    layer.get_mask_sizes = lambda count: (done[0] + int(count), 0)
    layer.is_sliding = False  # nothing is cut off: masks say how far a query sees


def _page_index(layer: Any, pages: _Pages, kv: LayerKV) -> None:
    def update(keys: Tensor) -> Tensor:  # [sequences, T, dim]
        return pages.swap(keys[:, None], kv.k)[:, 0]

    layer.update_indexer = update


def _states(
    layer: Any, entry: LayerKV, kept: Kept
) -> Iterator[tuple[Tensor, dict[int, Tensor], tuple[tuple[int, Shape], ...]]]:
    """Where both kinds of states lie, in the slots and in the layer, and their shapes."""
    yield entry.k, layer.conv_states, kept.inputs
    yield entry.v, layer.recurrent_states, kept.states


def _columns(shapes: tuple[tuple[int, Shape], ...]) -> Iterator[tuple[int, Shape, slice]]:
    """Where each state lies in a slot, one after the other."""
    at = 0
    for number, shape in shapes:
        yield number, shape, slice(at, at + prod(shape))
        at += prod(shape)
