"""Models written elsewhere, to vLLM's contract for weights, behind the same face as our own.

Such a class is built as ``Class(build, max_len)``, computes ``forward(batch, kv) -> logits`` like
``CausalLM.forward``, and brings its own way to load: ``load_weights(items)``, or parameters with
``weight_loader(param, tensor[, shard_id])`` and a ``packed_modules_mapping``. It is given whole
tensors. Where they land is learnt beforehand, by watching it load tensors without memory
(``trace_loading``), so coverage, digests, patches and pieces work as for any other model.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.errors import ConfigError, WeightMismatch, some
from rollout.kernels.region_table import RegionTables
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build
from rollout.models.model import Model
from rollout.models.weight_io.load import LoadPlan, NamedBox, WeightLoad
from rollout.models.weight_io.table import IGNORED, ParamSpec, WeightTable, check_table
from rollout.weights import PLAIN, Box, LazyTensor, Shape, TensorMeta, WeightSlot, WeightValue
from rollout.weights.names import EMBEDDING, HEAD, weight_dtype
from rollout.weights.spellings import Spellings

Items = Iterable[tuple[str, Tensor]]
QKV = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}


class ForeignCausalLM(Model):
    """One rank's instance of an out-of-tree class.

    ``tensors``: what the checkpoint holds, whose names and shapes are the complete set. Raises
    ``WeightMismatch`` naming the parameters that its loading does not fill exactly once, or fills
    by more than copying.
    """

    def __init__(
        self, build: Build, max_len: int, kind: type[nn.Module], tensors: Sequence[TensorMeta]
    ) -> None:
        super().__init__(build, max_len)
        self._kind, self._tensors = kind, tuple(tensors)
        self.inner = _construct(kind, build, max_len)
        self.table = self._learn()
        check_table(self.table)
        for parameter in self.inner.parameters():
            parameter.requires_grad_(False)
        self.eval()

    @property
    def owner(self) -> nn.Module:
        return self.inner

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        logits: Tensor = self.inner(batch, kv)
        return logits

    def begin_load(self) -> WeightLoad:
        return _ForeignLoad(
            *(self.table, self.storages(), self.build.dtype, self.after_load),
            loader_of(self.inner),
            tables=self.region_tables,
        )

    def after_load(self) -> None:
        derive = getattr(self.inner, "after_load", None)
        if derive is not None:
            derive()

    def empty_like(self) -> Self:
        return type(self)(self.build, self.max_len, self._kind, self._tensors)

    def _learn(self) -> WeightTable:
        """Watch an instance without memory load the checkpoint's tensors."""
        known = [t for t in self._tensors if tuple(t.name.split(".")[-2:]) not in IGNORED]
        tied = self.config.tied and any(t.name == EMBEDDING for t in known)
        aliases = {HEAD: EMBEDDING} if tied else {}
        hollow = _construct(
            self._kind, replace(self.build, device=torch.device("meta")), self.max_len
        )
        return trace_loading(
            hollow,
            loader_of(hollow),
            [
                replace(t, dtype=weight_dtype(t.name, self.build.dtype))
                for t in known
                if t.name not in aliases
            ],
            aliases,
        )


class _ForeignLoad(WeightLoad):
    """Whole tensors go through the model's own loading, patches and pieces to their slots."""

    def __init__(self, *args: Any, tables: RegionTables) -> None:
        *ours, self._load = args
        super().__init__(*ours, tables=tables)

    def plan(self, parts: Sequence[NamedBox]) -> LoadPlan | None:
        return None

    def _write(self, name: str, value: WeightValue) -> int:
        if isinstance(value, LazyTensor):
            value = value.read(Box.full(value.shape))
        if not isinstance(value, Tensor):
            return super()._write(name, value)
        slots = self._table.slots[name]
        if any(slot.take.numel for slot in slots):
            self.journal.note_everything()  # its loader may write what it likes
            self._load([(name, value.detach().to(weight_dtype(name, self._dtype)))])
        return sum(slot.take.numel for slot in slots)


def loader_of(model: nn.Module) -> Callable[[Items], Any]:
    """The model's own ``load_weights``, else one by its parameters' ``weight_loader``."""
    own = getattr(model, "load_weights", None)
    if callable(own):
        return own  # type: ignore[no-any-return]
    parameters = dict(model.named_parameters())
    packed = packed_parts(getattr(model, "packed_modules_mapping", {}))

    def load(items: Items) -> None:
        for name, tensor in items:
            parts = name.split(".")
            at = next((i for i, part in enumerate(parts) if part in packed), None)
            if at is None:
                if name in parameters:
                    _loader(parameters[name])(parameters[name], tensor)
                continue
            into, shard = packed[parts[at]]
            target = ".".join((*parts[:at], into, *parts[at + 1 :]))
            if target not in parameters:
                raise ConfigError(
                    f"{type(model).__name__}: packed_modules_mapping sends {name} to {target}, "
                    "which is no parameter of it"
                )
            _loader(parameters[target])(parameters[target], tensor, shard)

    return load


def packed_parts(mapping: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Component of a file's name -> (component of the parameter's, shard id).

    Reads vLLM's direction, ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}`` (shard ids q, k, v, or
    the place in the list), and nano-vllm's, ``{"q_proj": ("qkv_proj", "q")}``.
    """
    found: dict[str, tuple[str, Any]] = {}
    for key, value in mapping.items():
        if isinstance(value, tuple):
            found[key] = (value[0], value[1])
            continue
        for index, part in enumerate(value):
            if part != key:
                found[part] = (key, QKV.get(part, index))
    return found


def _loader(parameter: nn.Parameter) -> Callable[..., Any]:
    return getattr(parameter, "weight_loader", None) or _copy_whole


def _copy_whole(parameter: nn.Parameter, tensor: Tensor) -> None:
    parameter.data.copy_(tensor)


def _construct(kind: type[nn.Module], build: Build, max_len: int) -> nn.Module:
    """Build on the device of ``build``; floating-point parameters get its dtype.

    Raises ``ConfigError`` where the class takes something else, or has another ``forward``.
    """
    _check_signature(kind, kind, ("build", "max_len"))
    _check_signature(kind, kind.forward, ("self", "batch", "kv"))
    with build.device:
        model = kind(build, max_len)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(weight_dtype(name, build.dtype))
    return model


def _check_signature(kind: type[nn.Module], call: Any, takes: tuple[str, ...]) -> None:
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return  # of native code; it will say itself
    try:
        signature.bind(*takes)
    except TypeError as error:
        what = "is built as" if call is kind else "computes"
        shown = kind.__name__ if call is kind else f"{kind.__name__}.forward"
        raise ConfigError(
            f"{shown}{signature} does not fit ({error}): a model class {what} {shown}"
            f"({', '.join(t for t in takes if t != 'self')}); docs/add_a_model.md has one"
        ) from None


def trace_loading(
    model: nn.Module,
    load: Callable[[Items], Any],
    tensors: Sequence[TensorMeta],
    aliases: Mapping[str, str],
) -> WeightTable:
    """The weight table of ``model`` (on meta), whose ``load`` is shown each of ``tensors`` once.

    Boxes of a tensor that are copied into boxes of a parameter become slots, boxes filled with a
    constant its padding; a tensor of which nothing is taken gets an empty slot. Raises
    ``WeightMismatch`` naming what is written by other means: such values could not be verified.
    """
    parameters = dict(model.named_parameters())
    watch = _Watch({name: parameter.data for name, parameter in parameters.items()})
    slots: dict[str, tuple[WeightSlot, ...]] = {}
    first = next(iter(parameters), "")
    with torch.no_grad():
        for meta in tensors:
            source = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
            with watch.source(meta.name, source):
                load([(meta.name, source)])
            slots[meta.name] = tuple(
                WeightSlot(meta.name, meta.shape, take, param, put)
                for param, put, take in watch.taken()
            ) or (_nothing(meta, first, parameters),)
    if watch.problems:
        raise WeightMismatch(
            f"{type(model).__name__} loads by more than copying boxes, so what it holds cannot be "
            f"verified: {some(list(dict.fromkeys(watch.problems)), between='; ')}"
        )
    specs = {
        name: ParamSpec(tuple(p.shape), PLAIN, tuple(dict.fromkeys(watch.filled[name])))
        for name, p in parameters.items()
    }
    spellings = Spellings.of({meta.name: meta.shape for meta in tensors})
    return WeightTable(slots, specs, dict(aliases), spellings=spellings)


def _nothing(meta: TensorMeta, param: str, parameters: Mapping[str, Tensor]) -> WeightSlot:
    take = Box.full((0,) * len(meta.shape))
    return WeightSlot(meta.name, meta.shape, take, param, Box.full((0,) * parameters[param].dim()))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies from one source into parameters; views are told by storage and strides."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {storage_id(p): (name, tuple(p.shape)) for name, p in parameters.items()}
        self._kept = parameters  # storages are told apart while they live
        self._name, self._tensor = "", torch.empty(0)
        self._copies: list[tuple[str, Box, Box]] = []
        self.filled: dict[str, list[Box]] = defaultdict(list)
        self.problems: list[str] = []

    def source(self, name: str, tensor: Tensor) -> _Watch:
        self._name, self._tensor, self._copies = name, tensor, []
        return self

    def taken(self) -> list[tuple[str, Box, Box]]:
        return self._copies

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        target = args[0] if args and isinstance(args[0], Tensor) else None
        written = func._schema.is_mutable and target is not None
        if written and target is not None and storage_id(target) in self._parameters:
            self._note(func._schema.name, target, args)
        return func(*args, **(kwargs or {}))

    def _note(self, op: str, target: Tensor, args: tuple[Any, ...]) -> None:
        param, shape = self._parameters[storage_id(target)]
        put = box_of(target, shape)
        if put is None:
            self.problems.append(f"{self._name}: writes no box of {param}")
        elif op in ("aten::fill_", "aten::zero_"):
            if op == "aten::fill_" and args[1] != 0:
                self.problems.append(f"{self._name}: fills {param} with {args[1]}")
            self.filled[param].append(put)
        elif op == "aten::copy_" and storage_id(args[1]) == storage_id(self._tensor):
            take = box_of(args[1], tuple(self._tensor.shape))
            if take is None or args[1].numel() != target.numel():
                self.problems.append(f"{self._name}: no box of it goes to {param}")
            else:
                self._copies.append((param, put, take))
        else:
            name = op.removeprefix("aten::")
            self.problems.append(f"{self._name}: {param} is written by {name} of computed values")


def box_of(view: Tensor, shape: Shape) -> Box | None:
    """Which box of a row-major tensor of ``shape`` a view of it is, in order; else None."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    starts, left = [], view.storage_offset()
    for stride in strides[: len(shape)]:
        starts.append(left // stride)
        left %= stride
    sizes = [1] * len(shape)
    axis = 0
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        while axis < len(shape) and (strides[axis] != stride or shape[axis] == 1):
            axis += 1
        if axis == len(shape) or size > shape[axis] - starts[axis]:
            return None
        sizes[axis] = size
        axis += 1
    if 0 in sizes or not view.numel():
        return Box.full((0,) * len(shape))
    return Box(tuple(starts), tuple(a + n for a, n in zip(starts, sizes, strict=True)))


def storage_id(tensor: Tensor) -> int:
    """Of its storage, which views share; good while the storage lives."""
    return int(tensor.untyped_storage()._cdata)
