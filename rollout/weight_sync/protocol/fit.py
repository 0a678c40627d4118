"""Does what will be sent fit what the model wants? Answered from names, shapes and dtypes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from rollout.errors import WeightMismatch, of_each, some
from rollout.weights import CASTABLE, Shape, TensorMeta, WeightSlot
from rollout.weights.components import POLICY, check_components, component_of
from rollout.weights.names import nearest
from rollout.weights.packed_rows import packed_shape
from rollout.weights.quantization import Scheme
from rollout.weights.spellings import Spellings

_MOST = 12  # problems spelled out in one message
_FEW = 3  # behind what explains them


def differences(
    sent: Sequence[TensorMeta],
    wanted: Mapping[str, TensorMeta],
    aliases: Mapping[str, str],
    *,
    partial: bool = False,
    components: Sequence[str] = (POLICY,),
    spelled: Sequence[WeightSlot] = (),
    schemes: Mapping[str, Scheme] | None = None,
) -> list[str]:
    """A line per unknown, repeated, misshapen, mistyped or (not if ``partial``) missing tensor.

    Judged in file form: a tensor under another spelling of ``wanted`` (fused experts; ``spelled``,
    those that no name shows) counts as those that it holds, and codes of one of ``schemes`` count
    as the tensor. Of the ``components``, and those that
    are sent, nothing may be missing.
    """
    problems: list[str] = []
    if schemes:
        found = ((meta, wanted.get(meta.name)) for meta in sent)
        sent = [
            want if want is not None and is_packed(meta.dtype, meta.shape, want, schemes) else meta
            for meta, want in found
        ]
    sent = _in_file_form(sent, wanted, spelled, problems)
    counts = Counter(meta.name for meta in sent)
    problems += [f"{name} is sent {n} times" for name, n in counts.items() if n > 1]
    for meta in sent:
        want = wanted.get(aliases.get(meta.name, meta.name))
        if want is None:
            near = nearest(meta.name, wanted) if len(problems) < _MOST else None
            problems.append(f"{meta.name} is unknown" + (f" (nearest: {near})" if near else ""))
        elif (wrong := dtype_fault(meta.dtype, want.dtype)) is not None:
            problems.append(f"{meta.name} {wrong}")  # packed codes have other shapes, too
        elif meta.shape != want.shape:
            problems.append(f"{meta.name} has shape {meta.shape}, the model wants {want.shape}")
    if not partial:
        owners = {aliases.get(name, name) for name in counts} & set(counts)
        whole = {*components, *map(component_of, counts)}
        problems += [
            f"{name} is missing"
            for name in wanted
            if name not in owners and component_of(name) in whole
        ]
    return problems


def _in_file_form(
    sent: Sequence[TensorMeta],
    wanted: Mapping[str, TensorMeta],
    spelled: Sequence[WeightSlot],
    problems: list[str],
) -> list[TensorMeta]:
    spellings = Spellings.of({name: meta.shape for name, meta in wanted.items()}, spelled)
    found = []
    for meta in sent:
        try:
            parts = spellings.split_shape(meta.name, meta.shape)
        except WeightMismatch as error:
            problems.append(str(error))
            continue
        found += [TensorMeta(name, meta.dtype, shape) for name, shape in parts]
    return found


def _remedy(
    sent: Sequence[TensorMeta], wanted: Mapping[str, TensorMeta], aliases: Mapping[str, str]
) -> str:
    """What most differences come of, where that shows; "" where it does not."""
    names = [meta.name for meta in sent]
    if names and all(f"model.{name}" in wanted and name not in wanted for name in names):
        return "its names begin within 'model.': send the whole model, not its .model"
    known = {*wanted, *aliases}
    if prefix := _prefix(names, known):
        count = sum(name.startswith(prefix) for name in names)
        others = [name for name in names if not name.startswith(prefix) and name not in known]
        beside = f" (beside these it has no {some(others, 2)})" if others else ""
        return (
            f"{count} names begin with {prefix!r}, and are the model's without it{beside}: send "
            "the module that lies there, or take the prefix off"
        )
    return _of_shards(sent, wanted)


def _prefix(names: Sequence[str], known: Collection[str]) -> str:
    """Behind which most of the names that have it are known, as within a wrapper: "policy."."""
    for name in names:
        if name in known:
            continue
        parts = name.split(".")
        for cut in range(1, len(parts)):
            if ".".join(parts[cut:]) in known:
                prefix = ".".join(parts[:cut]) + "."
                behind = [one.removeprefix(prefix) for one in names if one.startswith(prefix)]
                count = sum(one in known for one in behind)
                return prefix if count > 1 and 2 * count > len(behind) else ""
    return ""


def _of_shards(sent: Sequence[TensorMeta], wanted: Mapping[str, TensorMeta]) -> str:
    """Where all that does not fit is an equal part of the first dimension."""
    pairs = [(meta.shape, wanted[meta.name].shape) for meta in sent if meta.name in wanted]
    wrong = [(is_, whole) for is_, whole in pairs if is_ != whole]
    if len(wrong) < 2 or any(not is_ or is_[1:] != whole[1:] or not is_[0] for is_, whole in wrong):
        return ""
    parts = {-(-whole[0] // is_[0]) for is_, whole in wrong}
    if len(parts) != 1 or max(parts) < 2:
        return ""
    return (
        f"{len(wrong)} tensors have 1/{max(parts)} of the model's rows, as the local shards of so "
        "many ranks: pass the model, or its DTensors, on every rank"
    )


def check_metadata(
    sent: Sequence[TensorMeta],
    wanted: Mapping[str, TensorMeta],
    aliases: Mapping[str, str],
    *,
    partial: bool = False,
    components: Sequence[str] = (POLICY,),
    spelled: Sequence[WeightSlot] = (),
    schemes: Mapping[str, Scheme] | None = None,
) -> None:
    """Raise ``WeightMismatch`` naming every difference (the first dozen spelled out)."""
    whole = {n: meta for n, meta in wanted.items() if component_of(n) in components}
    if len(sent) == len(whole) and {meta.name: meta for meta in sent} == whole:
        return
    known = list(dict.fromkeys(map(component_of, wanted)))
    check_components((*components, *(component_of(meta.name) for meta in sent)), known)
    problems = differences(
        *(sent, wanted, aliases),
        partial=partial,
        components=components,
        spelled=spelled,
        schemes=schemes,
    )
    if problems:
        remedy = _remedy(sent, wanted, aliases)
        listed = some(of_each(problems), _FEW if remedy else _MOST, "; ")
        raise WeightMismatch(
            f"the update does not fit the model: {remedy}{'; ' if remedy else ''}{listed}",
            problems=problems,
        )


def is_packed(
    dtype: torch.dtype, shape: Shape, wanted: TensorMeta, schemes: Mapping[str, Scheme]
) -> bool:
    """Whether a tensor is the codes and scales of ``wanted``, in bytes (``packed_rows``)."""
    scheme = schemes.get(wanted.name)
    if scheme is None or dtype != torch.uint8:
        return False
    return shape == packed_shape(wanted.shape, scheme)


def dtype_fault(sent: torch.dtype, wanted: torch.dtype) -> str | None:
    """Why values of dtype ``sent`` cannot become a ``wanted`` weight, or None."""
    if sent == wanted or (sent in CASTABLE and wanted in CASTABLE):
        return None
    if wanted in CASTABLE:
        return (
            f"has dtype {sent}, the model wants {wanted}: quantised values mean nothing without "
            "their scales; dequantise it first"
        )
    return f"has dtype {sent}, the model wants {wanted}"
