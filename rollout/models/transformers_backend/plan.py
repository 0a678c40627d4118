"""Plans of tensor parallelism for transformers' own modules, carried out by slots.

A plan (``base_model_tp_plan`` of a config, ``_tp_plan`` of a class; ``own_plan.py``)
has a kind for each module or parameter that is cut. The kind says which boxes of a parameter a rank
keeps, so that the table of the whole model becomes the rank's, and what the module does with the
other ranks (``parts.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.models.transformers_backend.own_plan import own_kinds
from rollout.models.transformers_backend.parts import KINDS, Place, run_as
from rollout.models.weight_io.table import ParamSpec, WeightTable
from rollout.weights import PLAIN, Box, Shape, WeightSlot

NO_PLAN = "neither transformers (base_model_tp_plan) nor rollout has a plan of how to cut it"
QUERIES, KEYS, VALUES = "q_proj", "k_proj", "v_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Name of a module or parameter -> kind, and ``by`` whose plan; "" where there is none."""

    kinds: Mapping[str, str]
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a rank keeps of a parameter: boxes of the whole, and where they lie here."""

    shape: Shape
    pieces: tuple[tuple[Box, Box], ...]
    padding: tuple[Box, ...] = ()


def plan_of(model: nn.Module) -> Plan:
    """Transformers' for its decoder, ours, or ours over theirs; the vocabulary at both ends is cut
    by any.
    """
    whole: Any = model
    names = {id(module): name for name, module in model.named_modules()}
    held = list(model.named_parameters(remove_duplicate=False))
    every = [*names.values(), *(name for name, _ in held)]
    told = dict(getattr(whole, "_tp_plan", None) or {})
    numbered = {name: re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in every}
    theirs = {name: told[key] for name, key in numbered.items() if key in told}
    ours = own_kinds(whole.config.get_text_config(), every)
    kinds = "embedding_rowwise", "colwise_gather_output"
    ends = _ends(model)
    around = {
        names[id(module)]: kind
        for module, kind in zip(ends, kinds, strict=True)
        if module is not None
    }
    bias = getattr(ends[1], "bias", None)  # which BERT's heads hold themselves, too
    around |= {name: kinds[1] for name, parameter in held if parameter is bias}
    by = "transformers' plan" if set(theirs) - set(around) else ""
    if ours:
        by = f"{by}, mended by rollout's" if by else "rollout's plan"
    return Plan(kinds={**around, **theirs, **ours} if by else {}, by=by)


def cut(model: nn.Module, tp: TensorParallel, device: torch.device) -> dict[str, Share]:
    """Leave ``model`` a rank's parts, uninitialised on ``device``; what they are, by parameter.

    Parameters that are tied stay so. Raises ``ConfigError`` naming the module and kind that cannot
    be cut so.
    """
    place, rules = Place(tp), _rules(model)
    copies = _copied_heads(model, rules, tp.size)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shares: dict[str, Share | None] = {}
    fresh: dict[int, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        kind, times = KINDS[rules.get(name, "replicate")], copies.get(name, 1)
        for own, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full = f"{name}.{own}" if name else own
            rule = rules.get(full) or rules.get(name, "replicate")
            where = tp.rank // times, tp.size // times
            share = _share(full, own, rule, tuple(parameter.shape), *where)
            known = names[id(parameter)]
            if shares.setdefault(known, share) != share:
                raise ConfigError(f"{full}: it is {known}, which the plan cuts otherwise")
            if id(parameter) not in fresh:
                fresh[id(parameter)] = _part(parameter, share, device)
        if kind.runs is not None:
            run_as(name, module, kind, rules[name], place)
        _divide(name, module, kind.counts, tp.size, copies)
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


def _rules(model: nn.Module) -> Mapping[str, str]:
    """The kinds of the plan, all known."""
    plan = plan_of(model)
    if not plan.by:
        raise ConfigError(NO_PLAN)
    for name, kind in plan.kinds.items():
        if kind not in KINDS:
            raise ConfigError(f"{name}: its plan has the kind {kind!r}, which is not known here")
    return plan.kinds


def _ends(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The vocabulary at both ends, where these are plain modules."""
    whole: Any = model
    first, last = whole.get_input_embeddings(), whole.get_output_embeddings()
    return (
        first if isinstance(first, nn.Embedding) else None,
        last if isinstance(last, nn.Linear) else None,
    )


def _copied_heads(model: nn.Module, rules: Mapping[str, str], ranks: int) -> dict[str, int]:
    """Projections of keys and values with fewer heads than there are ranks, and how many of these
    have copies of each; attention that has some is told that its groups are smaller.

    Raises ``ConfigError`` where heads do not come out.
    """
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        dim = getattr(module, "head_dim", None)
        cut = {own for own in (QUERIES, KEYS, VALUES) if rules.get(f"{name}.{own}") == "colwise"}
        if not isinstance(dim, int) or KEYS not in cut:
            continue
        heads = max(1, _rows(module, KEYS) // dim)
        queries = _rows(module, QUERIES) // dim if QUERIES in cut else ranks
        if queries % ranks:
            raise ConfigError(f"{queries} heads of queries do not divide over them")
        if heads % ranks and ranks % heads:
            raise ConfigError(f"{heads} heads of keys and values do not divide over them")
        if (times := ranks // heads) > 1:
            found |= {f"{name}.{own}": times for own in cut - {QUERIES}}
            groups = getattr(module, "num_key_value_groups", None)
            if groups is not None:
                module.num_key_value_groups = groups // times
    return found


def _rows(module: nn.Module, own: str) -> int:
    rows: int = module.get_submodule(own).get_parameter("weight").shape[0]
    return rows


def _divide(
    name: str, module: nn.Module, counts: tuple[str, ...], ranks: int, copies: Mapping[str, int]
) -> None:
    """What ``module`` counts of its own becomes a rank's."""
    for count in counts:
        if (whole := module.__dict__.get(count)) is None:
            continue
        kept = "kv" in count or "key" in count
        times = copies.get(f"{name}.{KEYS}", 1) if kept else 1
        if whole % (ranks // times):
            raise ConfigError(f"{name}: its {count}, {whole}, does not divide over them")
        module.__dict__[count] = whole * times // ranks


def _share(name: str, own: str, rule: str, shape: Shape, rank: int, ranks: int) -> Share | None:
    """What the ``rank``th of ``ranks`` parts is of a parameter; None for all of it."""
    kind = KINDS[rule]
    if rule == "colwise" and own == "gate_up_proj" and len(shape) == 3:
        kind = KINDS["packed_colwise"]  # the plan is of files that have the two row by row in turns
    axis = kind.axis
    if axis is None or (len(shape) == 1 and not kind.biases):
        return None  # of one dimension: a bias of sums
    axis = 0 if len(shape) == 1 else axis % len(shape)
    rows, rest = divmod(shape[axis], kind.packed * ranks)
    if rest and not kind.padded:
        raise ConfigError(
            f"{name}: its plan says {rule}, and dimension {axis} of {list(shape)} is no multiple "
            f"of {kind.packed * ranks}"
        )
    rows += bool(rest)
    first = min(rank * rows, shape[axis])
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
