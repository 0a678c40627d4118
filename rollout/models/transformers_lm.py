"""A model that runs as transformers' own modules, its attention over our pages."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.errors import ConfigError
from rollout.kernels import paged_attention
from rollout.models.foreign import box_of, storage_id
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build
from rollout.models.model import Model
from rollout.models.module_map import replace_modules
from rollout.models.transformers_cache import SequenceCache
from rollout.models.transformers_probe import (
    EAGER,
    NAME,
    AttentionCall,
    bind,
    cache_argument,
    construct,
    load_class,
    position_arguments,
)
from rollout.models.weight_table import IGNORED, ParamSpec, WeightTable, check_table
from rollout.weights import PLAIN, Box, WeightSlot
from rollout.weights.fused_experts import Spellings
from rollout.weights.names import weight_dtype

CHECKED = (9, 4, 1)  # tokens of the steps that a first load is judged by
TOLERANCE = 1e-3  # of float32 logprobs between attention over pages and transformers' own


class TransformersCausalLM(Model):
    """One rank's instance.

    Weights come through slots as anywhere: the parameters, and the buffers that files have, in the
    spelling of the files or of the modules. After the first load its logits are compared with those
    of the same modules under transformers' own attention, so that a model whose layers are not what
    they seem is refused instead of served.
    """

    def __init__(self, build: Build, max_len: int, inner: nn.Module | None = None) -> None:
        super().__init__(build, max_len)
        config = build.config
        assert config.hf_values is not None
        self._checked = inner is not None
        if inner is None:
            kind, values = load_class(config.hf_values, config.architecture, config.code)
            attention = EAGER if config.kept is not None else NAME
            inner = construct(kind, values, build.dtype, build.device, attention)
            replace_modules(inner, config.modules)
            _own_buffers(inner, build.dtype)
        self.inner = inner
        self._keeps_rows = "logits_to_keep" in inspect.signature(inner.forward).parameters
        self._step = _Pages()
        self._token_wise = False  # what follows on a state, one token after the other
        if config.kept is None:
            bind(inner, self._step)
        self.table = _table(inner)
        check_table(self.table)
        body: Any = inner
        self.gives_hidden_states = body.base_model is not inner
        self.eval()

    @property
    def owner(self) -> nn.Module:
        return self.inner

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        if self.config.kept is not None:
            return self._one_by_one(batch, kv)
        self._step.begin(batch, kv)
        return self._logits(batch.input_ids, batch.positions, batch.logit_rows)

    def with_hidden_states(
        self, batch: ForwardBatch, kv: Sequence[LayerKV], count: int
    ) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        body: Any = self.inner
        hook = body.base_model.register_forward_hook(
            lambda module, args, out: seen.append(out.last_hidden_state[0])
        )
        try:
            logits = self(replace(batch, logit_rows=batch.logit_rows[:count]), kv)
        finally:
            hook.remove()
        return logits, torch.cat(seen)[batch.logit_rows]

    def after_load(self) -> None:
        if not self._checked and self.build.device.type != "meta":
            self._check()
            self._checked = True

    def empty_like(self) -> Self:
        fresh = type(self)(self.build, self.max_len, copy.deepcopy(self.inner))
        fresh._token_wise = self._token_wise
        return fresh

    def _one_by_one(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        """A pass for each sequence, whose modules attend by themselves over a cache of its own."""
        inner: Any = self.inner
        rows, starts = batch.logit_rows, batch.query_starts.tolist()
        logits: list[Tensor] = []
        order: list[Tensor] = []
        for number, context in enumerate(batch.context_lens.tolist()):
            first, last = starts[number : number + 2]
            before = last - context  # where the sequence's first token would lie
            follows = self._token_wise and context > last - first
            for at in range(first, last) if follows else (first,):
                part = slice(at, at + 1 if follows else last)
                cache = SequenceCache(
                    inner.config, self.config.kept or (), kv, batch, number, part, at - before
                )
                here = ((rows >= part.start) & (rows < part.stop)).nonzero()[:, 0]
                ids, places = batch.input_ids[part], batch.positions[part]
                logits.append(self._logits(ids, places, rows[here] - at, cache.inner))
                order.append(here)
                cache.put_back()
        return torch.cat(logits)[torch.cat(order).argsort()]

    def _logits(self, ids: Tensor, positions: Tensor, rows: Tensor, cache: Any = None) -> Tensor:
        keep = {"logits_to_keep": rows} if self._keeps_rows else {}
        self._step.positions = positions[None]
        how = position_arguments(self.inner, positions[None])
        how |= {} if cache is None else {cache_argument(self.inner): cache}
        out: Any = self.inner(input_ids=ids[None], use_cache=cache is not None, **how, **keep)
        logits: Tensor = out.logits[0] if self._keeps_rows else out.logits[0][rows]
        return logits[:, : self.config.vocab_size]

    @torch.no_grad()
    def _check(self) -> None:
        """Raise ``ConfigError`` unless pages give what transformers' own attention gives."""
        try:
            apart = self._apart()
        except Exception as error:
            raise ConfigError(
                f"{self.config.architecture} is not served: its modules fail over a cache "
                f"({type(error).__name__}: {str(error)[:200]})"
            ) from error
        if self._is_far(apart) and self.config.recurrent_layers:
            self._token_wise = True
            apart = self._apart()
        if self._is_far(apart):
            raise ConfigError(
                f"{self.config.architecture} is not served: over pages its logprobs differ from "
                f"those of transformers' own attention by up to {float(apart.max()):.3g}"
            )

    def _is_far(self, apart: Tensor) -> bool:
        exact = self.build.dtype in (torch.float32, torch.float64)
        far = apart.max() > TOLERANCE if exact else apart.mean() > 0.1
        return bool(far) or not bool(apart.isfinite().all())

    def _apart(self) -> Tensor:
        """By how much logprobs differ, over some steps of each of two sequences in turns and at
        once: modules that keep something of a sequence themselves show."""
        device, total = self.build.device, sum(CHECKED)
        ids = torch.arange(3, 3 + 2 * total, device=device) % self.config.vocab_size
        kv, inner = self._small_cache(2 * total), self.inner
        both = ids.view(2, total)
        ours: list[list[Tensor]] = [[], []]
        start = 0
        for count in CHECKED:
            for number, one in enumerate(both):
                ours[number].append(self(_chunk(one, start, count, number), kv))
            start += count
        by_interface = self.config.kept is None
        if by_interface:
            inner.set_attn_implementation(EAGER)  # type: ignore[operator]
        self._step.positions = None  # as the modules count by themselves
        try:
            theirs = [inner(input_ids=one[None], use_cache=False).logits[0] for one in both]
        finally:
            if by_interface:
                inner.set_attn_implementation(NAME)  # type: ignore[operator]
        wanted = torch.cat(theirs)[:, : self.config.vocab_size].float().log_softmax(-1)
        found = torch.cat([part for parts in ours for part in parts]).float().log_softmax(-1)
        return (found - wanted).abs()

    def _small_cache(self, tokens: int) -> list[LayerKV]:
        """Pages of one position, and two slots of states."""
        config, build = self.config, self.build
        _, heads, dim = config.cached_heads(1)
        pages = torch.zeros(tokens, heads, 1, dim, dtype=build.dtype, device=build.device)
        kv = [LayerKV(pages.clone(), pages.clone()) for _ in range(config.num_layers)]
        for layer in config.recurrent_layers:
            assert config.recurrence is not None
            inputs, state = config.recurrence.state_shapes(1)
            kv[layer] = LayerKV(
                torch.zeros(2, *inputs, dtype=build.dtype, device=build.device),
                torch.zeros(2, *state, device=build.device),
            )
        return kv


class _Pages:
    """Attends over the pages of a step, layer after layer."""

    positions: Tensor | None = None  # [1, T], of the step

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None
        self._kv: Iterator[LayerKV] = iter(())

    def __deepcopy__(self, memo: Any) -> _Pages:
        return _Pages()  # a copy of the modules is bound to a step of its own

    def begin(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> None:
        self._batch, self._kv = batch, iter(kv)

    def attend(self, call: AttentionCall) -> Tensor:
        batch, kv = self._batch, next(self._kv)
        assert batch is not None
        q, k, v = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        width, block, heads = kv.k.shape[3], kv.k.shape[2], k.shape[1]
        pages, offsets = batch.slot_mapping // block, batch.slot_mapping % block
        for cache, new in ((kv.k, k), (kv.v, v)):
            cache[pages, :heads, offsets] = _widened(new, width).to(cache.dtype)
        out = paged_attention(
            _widened(q, width).to(kv.k.dtype).contiguous(),
            kv.k[:, :heads],
            kv.v[:, :heads],
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            call.scale,
            call.window,
            call.softcap,
            call.sinks,
        )
        return out[None, ..., : v.shape[-1]].to(call.query.dtype)


def _widened(x: Tensor, width: int) -> Tensor:
    """Zeros behind each head change no product and no sum."""
    missing = width - x.shape[-1]
    return nn.functional.pad(x, (0, missing)) if missing else x


def _chunk(ids: Tensor, start: int, count: int, number: int) -> ForwardBatch:
    """``count`` tokens of sequence ``number`` from ``start``, in pages of one position."""
    places = torch.arange(start, start + count, device=ids.device)
    pages = torch.arange(len(ids), dtype=torch.int32, device=ids.device) + number * len(ids)
    return ForwardBatch(
        ids[start : start + count],
        places,
        places + number * len(ids),
        torch.tensor([0, count], dtype=torch.int32, device=ids.device),
        torch.tensor([start + count], dtype=torch.int32, device=ids.device),
        pages[None],
        torch.arange(count, device=ids.device),
        state_slots=torch.tensor([number], dtype=torch.int32, device=ids.device),
    )


def _own_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Buffers that files have become parameters: an update has to bring them, too."""
    for module in model.modules():
        kept = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        for name in kept:
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_floating_point():
                del module._buffers[name]
                parameter = nn.Parameter(buffer.to(weight_dtype(name, dtype)), requires_grad=False)
                module.register_parameter(name, parameter)


def _table(model: nn.Module) -> WeightTable:
    """Where each tensor of a file goes, by transformers' own way from memory to files.

    It is shown tensors without memory: what it gives a name is a view of a parameter, whose box it
    is. Raises ``ConfigError`` where a file's tensor is made in another way.
    """
    from transformers.core_model_loading import revert_weight_conversion

    params = {name: ParamSpec(tuple(p.shape), PLAIN) for name, p in model.named_parameters()}
    owners = {id(p): name for name, p in model.named_parameters()}
    held = {
        name: owners[id(p)] for name, p in model.named_parameters(remove_duplicate=False)
    }  # a tied name, too -> the parameter
    hollow = {name: torch.empty(spec.shape, device="meta") for name, spec in params.items()}
    # Views, to tell a tied name from its owner whatever files call either.
    given = {n: hollow[own] if n == own else hollow[own][...] for n, own in held.items()}
    spelled = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {id(given[name]) for name in spelled if name in given}
    with _Copies() as copies:
        files = revert_weight_conversion(model, dict(given))
    places = {storage_id(tensor): name for name, tensor in hollow.items()}
    slots: dict[str, tuple[WeightSlot, ...]] = {}
    aliases: dict[str, str] = {}
    taken: dict[tuple[str, Box], str] = {}
    # Owners before tied names; files have the owners alone.
    for name in sorted(files, key=lambda each: (id(files[each]) in tied, each not in params)):
        tensor = files[name]
        view = copies.origin(tensor)
        param = None if view is None else places.get(storage_id(view))
        put = None
        if view is not None and param is not None:
            put = box_of(view, params[param].shape)
        if param is None or put is None or put.numel != tensor.numel():
            raise ConfigError(f"{name}: no box of a parameter is this tensor of the files")
        if (param, put) in taken:
            aliases[name] = taken[param, put]
            continue
        taken[param, put] = name
        shape = tuple(tensor.shape)
        slots[name] = (WeightSlot(name, shape, Box.full(shape), param, put),)
    for name, own in held.items():
        if name not in files and (owner := taken.get((own, Box.full(params[own].shape)))):
            aliases |= {name: owner} if name != own else {}
    left = [name for name in model.state_dict() if name not in held]
    return WeightTable(
        slots,
        params,
        aliases,
        ignored=(*IGNORED, *(tuple(name.split(".")) for name in left)),
        spellings=Spellings.of(
            {name: found[0].shape for name, found in slots.items()},
            [slot for found in slots.values() for slot in found],
        ),
    )


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers of which tensor a copy is one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Storage -> (the copy, of what); storages are told apart while they live.
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def origin(self, tensor: Tensor) -> Tensor | None:
        """The view of what was there before that ``tensor``, a view of a copy, is one of."""
        while (found := self._copies.get(storage_id(tensor))) is not None:
            copied, source = found
            box = box_of(tensor, tuple(copied.shape)) if copied.is_contiguous() else None
            if box is None or box.numel != tensor.numel():
                return None
            tensor = source[box.slices]
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::clone", "aten::_to_copy"):
            self._copies[storage_id(out)] = (out, args[0])
        return out
