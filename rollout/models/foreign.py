"""Models written elsewhere, to vLLM's contract for weights, behind the same face as our own.

Such a class is built as ``Class(build, max_len)``, computes ``forward(batch, kv) -> logits`` like
``CausalLM.forward``, and brings its own way to load: ``load_weights(items)``, or parameters with
``weight_loader(param, tensor[, shard_id])`` and a ``packed_modules_mapping``. It is given whole
tensors. Where they land is learnt beforehand, by watching it load tensors without memory
(``loading_trace.py``), so coverage, digests, patches and pieces work as for any other model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rollout.errors import ConfigError
from rollout.models.causal_lm import EMBEDDING, HEAD, CausalLM
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build
from rollout.models.loading_trace import trace_loading
from rollout.models.slot_io import SlotIO
from rollout.models.weight_load import WeightLoad
from rollout.models.weight_table import IGNORED, WeightTable, check_table
from rollout.weights import Box, LazyTensor, TensorMeta, WeightSlot, WeightValue

Items = Iterable[tuple[str, Tensor]]
QKV = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}


class ForeignCausalLM(CausalLM):
    """One rank's instance of an out-of-tree class.

    ``tensors``: what the checkpoint holds, whose names and shapes are the complete set. Raises
    ``WeightMismatch`` naming the parameters that its loading does not fill exactly once, or fills
    by more than copying.
    """

    def __init__(
        self, build: Build, max_len: int, kind: type[nn.Module], tensors: Sequence[TensorMeta]
    ) -> None:
        nn.Module.__init__(self)
        config = build.config
        config.check_tensor_parallel(build.tp.size, build.expert_parallel)
        self.build, self.config, self.tp, self.max_len = build, config, build.tp, max_len
        self._kind, self._tensors = kind, tuple(tensors)
        self.inner = _construct(kind, build, max_len)
        self.table: WeightTable = self._learn()
        check_table(self.table)
        for parameter in self.inner.parameters():
            parameter.requires_grad_(False)
        self.eval()

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        logits: Tensor = self.inner(batch, kv)
        return logits

    def begin_load(self) -> WeightLoad:
        return _ForeignLoad(
            self.table, self.storages(), self.build.dtype, self.after_load, loader_of(self.inner)
        )

    def storages(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.inner.named_parameters()}

    def after_load(self) -> None:
        """Let the model re-derive what it derives, where it says how."""
        derive = getattr(self.inner, "after_load", None)
        if derive is not None:
            derive()

    def read_slot(self, slot: WeightSlot) -> Tensor:
        return self._slot_io(slot).read_box(slot, slot.take)

    def digest_slot(self, slot: WeightSlot, nonfinite: list[int] | None = None) -> int:
        return self._slot_io(slot).digest(slot, nonfinite)

    def _slot_io(self, slot: WeightSlot) -> SlotIO:
        return SlotIO(self.table, {slot.param: self.inner.get_parameter(slot.param).data})

    def empty_like(self) -> ForeignCausalLM:
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
            [replace(t, dtype=self.build.dtype) for t in known if t.name not in aliases],
            aliases,
        )


class _ForeignLoad(WeightLoad):
    """Whole tensors go through the model's own loading, patches and pieces to their slots."""

    def __init__(self, *args: Any) -> None:
        *ours, self._load = args
        super().__init__(*ours)

    def _write(self, name: str, value: WeightValue) -> int:
        if isinstance(value, LazyTensor):
            value = value.read(Box.full(value.shape))
        if not isinstance(value, Tensor):
            return super()._write(name, value)
        slots = self._table.slots[name]
        if any(slot.take.numel for slot in slots):
            self.journal.note_everything()  # its loader may write what it likes
            self._load([(name, value.detach().to(self._dtype))])
        return sum(slot.take.numel for slot in slots)


def is_foreign(kind: Any) -> bool:
    """Whether a registered class is not of our making, but knows how to load weights."""
    if isinstance(kind, type) and issubclass(kind, CausalLM):
        return False
    if isinstance(kind, type) and issubclass(kind, nn.Module):
        return True
    raise ConfigError(f"{kind!r} is not a model class: register a torch.nn.Module")


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
    """Build on the device of ``build``; floating-point parameters get its dtype."""
    with build.device:
        model = kind(build, max_len)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != build.dtype:
            parameter.data = parameter.data.to(build.dtype)
    return model
