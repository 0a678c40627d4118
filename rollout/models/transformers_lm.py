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
from rollout.kernels.rope_and_cache import store
from rollout.models.foreign import box_of, storage_id
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build
from rollout.models.model import Model
from rollout.models.module_map import replace_modules
from rollout.models.transformers_backend.arguments import cache_argument, position_arguments
from rollout.models.transformers_backend.cache import PassCache
from rollout.models.transformers_backend.classes import load_class
from rollout.models.transformers_backend.construct import construct
from rollout.models.transformers_backend.interface import EAGER, NAME, AttentionCall, bind
from rollout.models.transformers_backend.passes import Pass, Together, passes
from rollout.models.transformers_backend.plan import cut, cut_table
from rollout.models.transformers_judge import judge
from rollout.models.weight_io.table import IGNORED, ParamSpec, WeightTable, check_table
from rollout.weights import PLAIN, Box, WeightSlot
from rollout.weights.names import weight_dtype
from rollout.weights.spellings import Spellings


class TransformersCausalLM(Model):
    """One rank's instance; over several it is cut by a plan (``transformers_backend/plan.py``).

    Weights come through slots as anywhere: the parameters, and the buffers that files have, in the
    spelling of the files or of the modules. After the first load its logits are compared with those
    of the same modules under transformers' own attention, so that a model whose layers are not what
    they seem is refused instead of served.
    """

    def __init__(
        self, build: Build, max_len: int, made: tuple[nn.Module, WeightTable] | None = None
    ) -> None:
        super().__init__(build, max_len)
        config = build.config
        self._checked = made is not None
        inner, self.table = made or _made(build)
        self.inner = inner
        self._keeps_rows = "logits_to_keep" in inspect.signature(inner.forward).parameters
        self.step = _Pages(build.dtype)
        self.token_wise = False  # what follows on a state, one token after the other
        self.together = Together.PADDED
        if config.kept is None:
            bind(inner, self.step)
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
            return self._in_passes(batch, kv)
        self.step.begin(batch, kv)
        return self._logits(batch.input_ids[None], batch.positions[None], batch.logit_rows)[0]

    def with_hidden_states(
        self, batch: ForwardBatch, kv: Sequence[LayerKV], count: int
    ) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        body: Any = self.inner
        hook = body.base_model.register_forward_hook(
            lambda module, args, out: seen.append(out.last_hidden_state.flatten(0, 1))
        )
        try:
            logits = self(replace(batch, logit_rows=batch.logit_rows[:count]), kv)
        finally:
            hook.remove()
        tokens = torch.cat([one.tokens.flatten() for one in self._passes(batch)])
        return logits, torch.cat(seen)[tokens.argsort()[batch.logit_rows]]

    def after_load(self) -> None:
        for name, spec in self.table.params.items():
            for box in spec.padding:
                self.inner.get_parameter(name).data[box.slices] = 0
        if not self._checked and self.build.device.type != "meta":
            judge(self)
            self._checked = True

    def empty_like(self) -> Self:
        fresh = type(self)(self.build, self.max_len, (copy.deepcopy(self.inner), self.table))
        fresh.token_wise, fresh.together = self.token_wise, self.together
        return fresh

    def _in_passes(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Over caches of sequences that run together, as their modules attend by themselves."""
        inner: Any = self.inner
        wanted = torch.zeros_like(batch.input_ids, dtype=torch.bool)
        wanted[batch.logit_rows] = True
        logits: list[Tensor] = []
        order: list[Tensor] = []
        for one in self._passes(batch):
            cache = PassCache(inner.config, self.config.kept or (), kv, batch, one)
            rows = wanted[one.tokens].any(0).nonzero()[:, 0]
            ids, places = batch.input_ids[one.tokens], batch.positions[one.tokens]
            logits.append(self._logits(ids, places, rows, cache).flatten(0, 1))
            order.append(one.tokens[:, rows].flatten())
            cache.put_back()
        place = torch.empty_like(batch.input_ids)
        tokens = torch.cat(order)
        place[tokens] = torch.arange(len(tokens), device=place.device)
        return torch.cat(logits)[place[batch.logit_rows]]

    def _passes(self, batch: ForwardBatch) -> list[Pass]:
        """All of ``batch`` in one where attention goes through the interface."""
        kept = self.config.kept
        if kept is None:
            tokens = torch.arange(len(batch.input_ids), device=batch.input_ids.device)[None]
            return [Pass(sequences=(0,), tokens=tokens, past=(0,))]
        paged = any(each.kind != "states" for each in kept)
        return list(passes(batch, self.together, paged=paged, token_wise=self.token_wise))

    def _logits(
        self, ids: Tensor, positions: Tensor, rows: Tensor, cache: PassCache | None = None
    ) -> Tensor:
        """[sequences, rows, vocab] of ``ids`` [sequences, T]."""
        keep = {"logits_to_keep": rows} if self._keeps_rows else {}
        self.step.positions = positions
        how = position_arguments(self.inner, positions)
        if cache is not None:
            how |= {cache_argument(self.inner): cache.inner}
            how |= {} if cache.mask is None else {"attention_mask": cache.mask}
        out: Any = self.inner(input_ids=ids, use_cache=cache is not None, **how, **keep)
        logits: Tensor = out.logits if self._keeps_rows else out.logits[:, rows]
        return logits[..., : self.config.vocab_size]


class _Pages:
    """Attends over the pages of a step, layer after layer."""

    positions: Tensor | None = None  # [1, T], of the step

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype  # of what is stored and attended by, whatever modules compute in
        self._batch: ForwardBatch | None = None
        self._kv: Iterator[LayerKV] = iter(())

    def __deepcopy__(self, memo: Any) -> _Pages:
        return _Pages(self._dtype)  # a copy of the modules is bound to a step of its own

    def begin(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> None:
        self._batch, self._kv = batch, iter(kv)

    def attend(self, call: AttentionCall) -> Tensor:
        batch, kv = self._batch, next(self._kv)
        assert batch is not None
        q, k, v = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        width, block, heads = kv.k.shape[3], kv.k.shape[2], k.shape[1]
        pages, offsets = batch.slot_mapping // block, batch.slot_mapping % block
        caches = kv.k[:, :heads], kv.v[:, :heads]
        scales = [None if x is None else x[:, :heads] for x in (kv.k_scales, kv.v_scales)]
        for new, cache, own in zip((k, v), caches, scales, strict=True):
            store(_widened(new, width).to(self._dtype), cache, own, pages, offsets)
        out = paged_attention(
            _widened(q, width).to(self._dtype).contiguous(),
            *caches,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            call.scale,
            call.window,
            call.softcap,
            call.sinks,
            *scales,
        )
        return out[None, ..., : v.shape[-1]].to(call.query.dtype)


def _widened(x: Tensor, width: int) -> Tensor:
    """Zeros behind each head change no product and no sum."""
    missing = width - x.shape[-1]
    return nn.functional.pad(x, (0, missing)) if missing else x


def _made(build: Build) -> tuple[nn.Module, WeightTable]:
    """The modules, with this rank's parts of the parameters, and what goes there."""
    config, alone = build.config, build.tp.size == 1
    assert config.hf_values is not None
    kind, values = load_class(config.hf_values, config.architecture, config.code)
    attention = EAGER if config.kept is not None else NAME
    inner = construct(kind, values, build.dtype, build.device, attention, hollow=not alone)
    replace_modules(inner, config.modules)
    _own_buffers(inner, build.dtype)
    table = _table(inner)
    return inner, table if alone else cut_table(table, cut(inner, build.tp, build.device))


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
    is, or joins some of them, and is then another spelling of these. Raises ``ConfigError`` where a
    file's tensor is made in another way.
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
    joined: list[WeightSlot] = []
    # Owners before tied names; files have the owners alone.
    for name in sorted(files, key=lambda each: (id(files[each]) in tied, each not in params)):
        tensor = files[name]
        if parts := [(box, places.get(storage_id(one))) for box, one in copies.joined(tensor)]:
            for box, own in parts:
                if own is None or params[own].shape != box.shape:
                    raise ConfigError(f"{name}: joins other tensors than whole parameters")
                whole = Box.full(box.shape)
                slots[own] = (WeightSlot(own, box.shape, whole, own, whole),)
                taken[own, whole] = own
                joined.append(WeightSlot(own, box.shape, whole, name, box))
            continue
        view = copies.origin(tensor)
        param = None if view is None else places.get(storage_id(view))
        put = None if view is None or param is None else box_of(view, params[param].shape)
        if param is None or put is None or put.numel != tensor.numel():
            raise ConfigError(f"{name}: no box of a parameter is this tensor of the files")
        if (owner := taken.setdefault((param, put), name)) != name:
            aliases[name] = owner
            continue
        shape = tuple(tensor.shape)
        slots[name] = (WeightSlot(name, shape, Box.full(shape), param, put),)
    for name, own in held.items():
        told = name == own or name in files or name in slots
        if not told and (first := taken.get((own, Box.full(params[own].shape)))):
            aliases[name] = first
    left = [name for name in model.state_dict() if name not in held]
    return WeightTable(
        slots,
        params,
        aliases,
        ignored=(*IGNORED, *(tuple(name.split(".")) for name in left)),
        spellings=Spellings.of(
            {name: found[0].shape for name, found in slots.items()},
            [*joined, *(slot for found in slots.values() for slot in found)],
        ),
    )


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers of which tensor a copy is one, and which tensors are joined in one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Storage -> (the copy, of what); storages are told apart while they live.
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._joined: dict[int, tuple[Tensor, int, list[Tensor]]] = {}

    def origin(self, tensor: Tensor) -> Tensor | None:
        """The view of what was there before that ``tensor``, a view of a copy, is one of."""
        while (found := self._copies.get(storage_id(tensor))) is not None:
            copied, source = found
            box = box_of(tensor, tuple(copied.shape)) if copied.is_contiguous() else None
            if box is None or box.numel != tensor.numel():
                return None
            tensor = source[box.slices]
        return tensor

    def joined(self, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """The tensors that ``tensor`` is a whole concatenation of, and their boxes of it."""
        out, dim, pieces = self._joined.get(storage_id(tensor), (tensor, 0, []))
        if tensor.shape != out.shape or not tensor.is_contiguous():
            return
        at = 0
        for piece in pieces:
            ends = at, (at := at + piece.shape[dim])
            starts, stops = ([0] * out.dim(), list(out.shape))
            starts[dim], stops[dim] = ends
            view = self.origin(piece)
            yield Box(tuple(starts), tuple(stops)), piece if view is None else view

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::cat" and len(args[0]) > 1:
            dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
            self._joined[storage_id(out)] = (out, dim % out.dim(), list(args[0]))
        if func._schema.name in ("aten::clone", "aten::_to_copy"):
            self._copies[storage_id(out)] = (out, args[0])
        return out
