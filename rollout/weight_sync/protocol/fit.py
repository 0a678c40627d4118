"""Does what will be sent fit what the model wants? Answered from names, shapes and dtypes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from rollout.errors import WeightMismatch, of_each, some
from rollout.weights import CASTABLE, Shape, TensorMeta
from rollout.weights.components import POLICY, check_components, component_of
from rollout.weights.names import nearest
from rollout.weights.packed_rows import packed_shape
from rollout.weights.wanted import WantedWeights, by_name

_MOST = 12  # problems spelled out in one message
_FEW = 3  # behind what explains them


def differences(
    sent: Sequence[TensorMeta],
    wanted: WantedWeights,
    *,
    partial: bool = False,
    components: Sequence[str] = (POLICY,),
) -> list[str]:
    """A line per unknown, repeated, misshapen, mistyped or (not if ``partial``) missing tensor.

    Judged in file form: a tensor under another spelling (fused experts) counts as those that it
    holds, and codes that are taken count as the tensor. Of the ``components``, and those that are
    sent, nothing may be missing.
    """
    problems: list[str] = []
    if wanted.schemes:
        found = ((meta, wanted.tensors.get(meta.name)) for meta in sent)
        sent = [
            want if want is not None and is_packed(meta.dtype, meta.shape, want, wanted) else meta
            for meta, want in found
        ]
    sent = _in_file_form(sent, wanted, problems)
    counts = Counter(meta.name for meta in sent)
    problems += [f"{name} is sent {n} times" for name, n in counts.items() if n > 1]
    for meta in sent:
        want = wanted.get(meta.name)
        if want is None:
            near = nearest(meta.name, wanted.tensors) if len(problems) < _MOST else None
            problems.append(f"{meta.name} is unknown" + (f" (nearest: {near})" if near else ""))
        elif (wrong := dtype_fault(meta.dtype, want.dtype)) is not None:
            problems.append(f"{meta.name} {wrong}")  # packed codes have other shapes, too
        elif meta.shape != want.shape:
            problems.append(f"{meta.name} has shape {meta.shape}, the model wants {want.shape}")
    if not partial:
        owners = {wanted.aliases.get(name, name) for name in counts} & set(counts)
        whole = {*components, *map(component_of, counts)}
        problems += [
            f"{name} is missing"
            for name in wanted.tensors
            if name not in owners and component_of(name) in whole
        ]
    return problems


def _in_file_form(
    sent: Sequence[TensorMeta], wanted: WantedWeights, problems: list[str]
) -> list[TensorMeta]:
    found = []
    for meta in sent:
        try:
            parts = wanted.spellings.split_shape(meta.name, meta.shape)
        except WeightMismatch as error:
            problems.append(str(error))
            continue
        found += [TensorMeta(name, meta.dtype, shape) for name, shape in parts]
    return found


def _remedy(sent: Sequence[TensorMeta], wanted: WantedWeights) -> str:
    """What most differences come of, where that shows; "" where it does not."""
    names, tensors = [meta.name for meta in sent], wanted.tensors
    if names and all(f"model.{name}" in tensors and name not in tensors for name in names):
        return "its names begin within 'model.': send the whole model, not its .model"
    known = {*tensors, *wanted.aliases}
    if prefix := _prefix(names, known):
        count = sum(name.startswith(prefix) for name in names)
        others = [name for name in names if not name.startswith(prefix) and name not in known]
        beside = f" (beside these it has no {some(others, 2)})" if others else ""
        return (
            f"{count} names begin with {prefix!r}, and are the model's without it{beside}: send "
            "the module that lies there, or take the prefix off"
        )
    return _of_shards(sent, tensors)


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
    wanted: WantedWeights,
    *,
    partial: bool = False,
    components: Sequence[str] = (POLICY,),
) -> None:
    """Raise ``WeightMismatch`` naming every difference (the first dozen spelled out)."""
    whole = {n: meta for n, meta in wanted.tensors.items() if component_of(n) in components}
    if len(sent) == len(whole) and by_name(sent) == whole:
        return
    named = (*components, *(component_of(meta.name) for meta in sent))
    check_components(named, wanted.components)
    problems = differences(sent, wanted, partial=partial, components=components)
    if problems:
        remedy = _remedy(sent, wanted)
        listed = some(of_each(problems), _FEW if remedy else _MOST, "; ")
        raise WeightMismatch(
            f"the update does not fit the model: {remedy}{'; ' if remedy else ''}{listed}",
            problems=problems,
        )


def is_packed(dtype: torch.dtype, shape: Shape, one: TensorMeta, wanted: WantedWeights) -> bool:
    """Whether a tensor is the codes and scales of ``one``, in bytes (``packed_rows``)."""
    scheme = wanted.schemes.get(one.name)
    if scheme is None or dtype != torch.uint8:
        return False
    return shape == packed_shape(one.shape, scheme)


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
