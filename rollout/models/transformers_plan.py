"""Transformers' plan of tensor parallelism for its own modules, carried out by slots.

A plan (``base_model_tp_plan`` of a config, ``_tp_plan`` of a class) has a kind for each module or
parameter that is cut. Here a kind says which boxes of a parameter a rank keeps, so that the table
of the whole model becomes the rank's, and what the module does with the other ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.models.weight_table import ParamSpec, WeightTable
from rollout.weights import PLAIN, Box, Shape, WeightSlot

OUTPUTS, INPUTS = -2, -1  # axes of a weight [..., outputs, inputs]
NO_PLAN = "transformers has no plan (base_model_tp_plan) of how to cut it"
# Decoders, by model_type, that a sweep has shown to give other logits when cut by their plan.
REFUSED = {"gemma3n_text": "its MLPs take means over the columns that the plan cuts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a parameter is cut: along ``axis`` (None: whole on every rank), each of ``packed`` equal
    parts by itself, ``padded`` to a multiple of the ranks or not; and what its module, which has
    the attribute ``of``, runs as.
    """

    axis: int | None = None
    packed: int = 1
    padded: bool = False
    runs: type[Part] | None = None
    of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a rank keeps of a parameter: boxes of the whole, and where they lie here."""

    shape: Shape
    pieces: tuple[tuple[Box, Box], ...]
    padding: tuple[Box, ...] = ()


class Place:
    """This rank, as modules know it; tensors without memory have neighbours without any, too."""

    def __init__(self, tp: TensorParallel) -> None:
        self.rank, self.size, self._tp = tp.rank, tp.size, tp

    def __deepcopy__(self, memo: Any) -> Place:
        return self  # a copy of the modules has the same ranks

    def sum(self, x: Tensor) -> Tensor:
        return x if x.is_meta else self._tp.all_reduce(x.contiguous())

    def gather(self, x: Tensor, columns: int) -> Tensor:
        """The ranks' parts of the last dimension, without what is padding behind ``columns``."""
        if x.is_meta:
            return x.new_empty(*x.shape[:-1], columns)
        return self._tp.all_gather(x)[..., :columns]


class Part(nn.Module):
    """A module of transformers of whose parameters this rank has a part."""

    rollout_place: Place
    rollout_whole: int  # its attribute ``Kind.of``, as before it was cut


class SummedLinear(Part):
    """This rank's inputs: the outputs are sums over ranks, a bias is added behind them."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bias = self._parameters.get("bias")
        if bias is not None:
            self._parameters["bias"] = None
        try:
            y = self.rollout_place.sum(super().forward(x, *args, **kwargs))
        finally:
            if bias is not None:
                self._parameters["bias"] = bias
        return y if bias is None else y + bias


class SplitLinear(SummedLinear):
    """The same of inputs that every rank has whole."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight: Any = self.weight
        here = weight.shape[INPUTS]
        first = self.rollout_place.rank * here
        return super().forward(x[..., first : first + here], *args, **kwargs)


class Gathered(Part):
    """This rank's outputs, those of all side by side on every rank."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.rollout_place.gather(super().forward(*args, **kwargs), self.rollout_whole)


class Summed(Part):
    """What ranks make of their parts is added up."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.rollout_place.sum(super().forward(*args, **kwargs))


class Divided(Part):
    """All ranks give the same to a sum over them."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        part: Tensor = super().forward(x / self.rollout_place.size, *args, **kwargs)
        return part


class Vocabulary(Part):
    """Rows of an embedding: ids of other ranks are zeros here."""

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight: Any = self.weight
        local = ids - self.rollout_place.rank * weight.shape[0]
        here = (local >= 0) & (local < weight.shape[0])
        rows: Tensor = super().forward(torch.where(here, local, 0), *args, **kwargs)
        return self.rollout_place.sum(rows.masked_fill(~here[..., None], 0))


WHOLE = Kind()
KINDS: dict[str, Kind] = {
    "colwise": Kind(axis=OUTPUTS),
    "colwise_gather_output": Kind(axis=OUTPUTS, padded=True, runs=Gathered, of="out_features"),
    "rowwise": Kind(axis=INPUTS, runs=SummedLinear, of="in_features"),
    "rowwise_split_input": Kind(axis=INPUTS, runs=SplitLinear, of="in_features"),
    "packed_colwise": Kind(axis=OUTPUTS, packed=2),
    "packed_rowwise": Kind(axis=INPUTS, packed=2),
    "embedding_rowwise": Kind(axis=0, padded=True, runs=Vocabulary, of="num_embeddings"),
    "embedding_colwise": Kind(axis=1, runs=Gathered, of="embedding_dim"),
    "moe_tp_experts": Kind(runs=Summed),
    "moe_identity_expert": Kind(runs=Divided),
    "all_reduce": Kind(runs=Summed),
    # Whole, and their gradients are none of ours; parameters are tensors of this rank anyway.
    "replicated_with_grad_allreduce": WHOLE,
    "mla_kv_a_proj": WHOLE,
    "replicate": WHOLE,
    "local_params": WHOLE,
}
KINDS["colwise_rep"] = KINDS["colwise_gather_output"]
KINDS["rowwise_rep"] = KINDS["rowwise_split_input"]


def plan_of(model: nn.Module) -> dict[str, str]:
    """Module or parameter -> kind, ``*`` for numbers; empty where the decoder has no plan."""
    whole: Any = model
    plan = dict(getattr(whole, "_tp_plan", None) or {})
    ends = {name for name, module in model.named_modules() if module in _ends(model)}
    return plan if set(plan) - ends else {}


def cut(model: nn.Module, tp: TensorParallel, device: torch.device) -> dict[str, Share]:
    """Leave ``model`` a rank's parts, uninitialised on ``device``; what they are, by parameter.

    Parameters that are tied stay so. Raises ``ConfigError`` naming the module and kind that cannot
    be cut so.
    """
    place, rules = Place(tp), _rules(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shares: dict[str, Share | None] = {}
    fresh: dict[int, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        kind = KINDS[rules.get(name, "replicate")]
        for own, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full = f"{name}.{own}" if name else own
            rule = rules.get(full) or rules.get(name, "replicate")
            share = _share(full, own, rule, tuple(parameter.shape), tp)
            known = names[id(parameter)]
            if shares.setdefault(known, share) != share:
                raise ConfigError(f"{full}: it is {known}, which the plan cuts otherwise")
            if id(parameter) not in fresh:
                fresh[id(parameter)] = _part(parameter, share, device)
        if kind.runs is not None:
            _run_as(name, module, kind, rules[name], place)
    for module in model.modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[own] = fresh[id(parameter)]
    return {name: share for name, share in shares.items() if share is not None}


def cut_table(table: WeightTable, shares: Mapping[str, Share]) -> WeightTable:
    """The table of a rank that keeps ``shares``, from that of the whole model."""
    params = {
        name: spec if share is None else ParamSpec(share.shape, PLAIN, share.padding)
        for name, spec in table.params.items()
        for share in [shares.get(name)]
    }
    slots = {
        source: tuple(part for slot in found for part in _parts(slot, shares.get(slot.param)))
        or (_nothing(found[0], shares[found[0].param]),)
        for source, found in table.slots.items()
    }
    return replace(table, slots=slots, params=params)


def _rules(model: nn.Module) -> dict[str, str]:
    """The plan with every module and parameter by its own name."""
    plan = plan_of(model)
    if not plan:
        raise ConfigError(NO_PLAN)
    whole: Any = model
    if (why := REFUSED.get(whole.config.get_text_config().model_type)) is not None:
        raise ConfigError(f"transformers' plan is not true of it: {why}")
    every = [name for name, _ in model.named_modules()]
    every += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found = {name: kind for name in every if (kind := plan.get(re.sub(r"\d+", "*", name)))}
    names = {id(module): name for name, module in model.named_modules()}
    for module, kind in zip(
        _ends(model), ("embedding_rowwise", "colwise_gather_output"), strict=True
    ):
        if module is not None:
            found.setdefault(names[id(module)], kind)
    for name, kind in found.items():
        if kind not in KINDS:
            raise ConfigError(f"{name}: its plan has the kind {kind!r}, which is not known here")
    return found


def _ends(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The vocabulary at both ends, where these are plain modules."""
    whole: Any = model
    first, last = whole.get_input_embeddings(), whole.get_output_embeddings()
    return (
        first if isinstance(first, nn.Embedding) else None,
        last if isinstance(last, nn.Linear) else None,
    )


def _share(name: str, own: str, rule: str, shape: Shape, tp: TensorParallel) -> Share | None:
    """What this rank keeps of a parameter; None for all of it."""
    kind = KINDS[rule]
    if rule == "colwise" and own == "gate_up_proj" and len(shape) == 3:
        kind = KINDS["packed_colwise"]  # the plan is of files that have the two row by row in turns
    axis = kind.axis
    if axis is None or (len(shape) == 1 and (axis == INPUTS or rule == "embedding_colwise")):
        return None  # of one dimension: a bias of sums
    axis = 0 if len(shape) == 1 else axis % len(shape)
    rows, rest = divmod(shape[axis], kind.packed * tp.size)
    if rest and not kind.padded:
        raise ConfigError(
            f"{name}: its plan says {rule}, and dimension {axis} of {list(shape)} is no multiple "
            f"of {kind.packed * tp.size}"
        )
    rows += bool(rest)
    first = min(tp.rank * rows, shape[axis])
    count = min(rows, shape[axis] - first)
    here = (*shape[:axis], rows * kind.packed, *shape[axis + 1 :])
    step = shape[axis] // kind.packed
    pieces = tuple(
        (_along(shape, axis, n * step + first, count), _along(here, axis, n * rows, count))
        for n in range(kind.packed)
    )
    padding = (_along(here, axis, count, rows - count),) if count < rows else ()
    return Share(shape=here, pieces=pieces, padding=padding)


def _along(shape: Shape, axis: int, first: int, count: int) -> Box:
    full = Box.full(shape)
    starts, stops = list(full.starts), list(full.stops)
    starts[axis], stops[axis] = first, first + count
    return Box(tuple(starts), tuple(stops))


def _part(parameter: nn.Parameter, share: Share | None, device: torch.device) -> nn.Parameter:
    shape = tuple(parameter.shape) if share is None else share.shape
    make = torch.zeros if share is not None and share.padding else torch.empty
    return nn.Parameter(make(shape, dtype=parameter.dtype, device=device), requires_grad=False)


def _run_as(name: str, module: nn.Module, kind: Kind, rule: str, place: Place) -> None:
    """Make ``module`` one of its own class that runs as ``kind`` says, in place."""
    if kind.of and not hasattr(module, kind.of):
        raise ConfigError(
            f"{name}: its plan says {rule}, and a {type(module).__name__} has no {kind.of}"
        )
    own: Any = type(module)
    runs: Any = kind.runs
    module.__class__ = _class(own, runs)
    module.__dict__["rollout_place"] = place
    module.__dict__["rollout_whole"] = getattr(module, kind.of) if kind.of else 0


@cache
def _class(kind: Any, runs: Any) -> type[nn.Module]:
    return type(kind.__name__, (runs, kind), {"__module__": kind.__module__})


def _parts(slot: WeightSlot, share: Share | None) -> Iterator[WeightSlot]:
    """What a rank takes of a slot of the whole model."""
    if share is None:
        yield slot
        return
    for whole, here in share.pieces:
        if (put := slot.put.intersect(whole)) is not None:
            back = tuple(b - a for a, b in zip(whole.starts, here.starts, strict=True))
            yield replace(slot, take=_taken(slot, put), put=put.shifted(back))


def _taken(slot: WeightSlot, put: Box) -> Box:
    """Which box of its source ``put``, a box of the slot's, takes."""
    if put == slot.put:
        return slot.take
    ours = [axis for axis, size in enumerate(slot.put.shape) if size > 1]
    theirs = [axis for axis, size in enumerate(slot.take.shape) if size > 1]
    if [slot.put.shape[a] for a in ours] != [slot.take.shape[a] for a in theirs]:
        raise ConfigError(f"{slot.source}: it lies in another shape in {slot.param}, which is cut")
    starts, stops = list(slot.take.starts), list(slot.take.stops)
    for a, b in zip(ours, theirs, strict=True):
        starts[b] = slot.take.starts[b] + put.starts[a] - slot.put.starts[a]
        stops[b] = starts[b] + put.shape[a]
    return Box(tuple(starts), tuple(stops))


def _nothing(slot: WeightSlot, share: Share) -> WeightSlot:
    """Known here, and all of it on other ranks."""
    take, put = Box.full((0,) * len(slot.shape)), Box.full((0,) * len(share.shape))
    return replace(slot, take=take, put=put)
