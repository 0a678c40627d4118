"""Factors of routed experts in files of PEFT's, as those of a parameter that stacks all of them.

Of transformers 5 (``target_parameters``), whose wrappers of one module lie within one another:

    X.mlp.experts.base_layer.lora_A.weight  [experts x rank, in]    of gate_up_proj, innermost
    X.mlp.experts.lora_A.weight                                     of down_proj

Of transformers 4, a linear of each expert: ``X.mlp.experts.3.up_proj.lora_A.weight`` [rank, in].
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights.adapters import EXPERTS, A, B, ModuleSpec
from rollout.weights.expert_names import EXPERT_NAMES, memory_name

_INNERMOST_FIRST = ("gate_up_proj", "up_proj", "down_proj")  # as modules register them
_WITHIN = ".base_layer"
_ONE = re.compile(r"(.*\.experts)\.(\d+)\.([^.]+)\.lora_A\.weight")

Factors = tuple[Tensor, Tensor, float]  # A, B, and their scaling
Scaling = Callable[[str, int], float]  # of a module of a rank


def take_experts(
    tensors: dict[str, Tensor],
    targets: Sequence[str],
    rank_of: Callable[[str], int],
    scaling: Scaling,
    path: Path,
) -> tuple[dict[str, ModuleSpec], dict[str, Tensor]]:
    """Take the factors of experts out of ``tensors``: their modules, and them as they are sent.

    ``targets``: ``target_parameters``, which name a parameter alone where PEFT has made them of
    ``target_modules`` (gate_proj, up_proj, down_proj). ``rank_of`` a parameter. ``ConfigError``
    names what does not fit together.
    """
    modules: dict[str, ModuleSpec] = {}
    found: dict[str, Tensor] = {}
    for parameter, stem in _wrapped(tensors, targets, path).items():
        down, up = tensors.pop(stem + A), tensors.pop(stem + B, None)
        rank = rank_of(parameter)
        fits = down.dim() == 2 and up is not None and up.dim() == 2 and up.shape[1] == len(down)
        if not fits or rank < 1 or len(down) % rank:
            raise ConfigError(f"{path}: {stem}{A} and {stem}{B} are no factors of rank {rank}")
        assert up is not None
        modules[parameter] = ModuleSpec(rank=rank, scaling=scaling(parameter, rank), kind=EXPERTS)
        found |= {parameter + A: down, parameter + B: up}
    for prefix, linears in _one_by_one(tensors, scaling, path).items():
        for leaf, factors in _stacked(linears, f"{path}: {prefix}"):
            a, b, spec = factors
            parameter = f"{memory_name(prefix)}.{leaf}"
            modules[parameter] = spec
            found |= {parameter + A: a, parameter + B: b}
    return modules, found


def _wrapped(tensors: Mapping[str, Tensor], targets: Sequence[str], path: Path) -> dict[str, str]:
    """By parameter, what the names of its factors begin with."""
    wrappers = defaultdict(list)
    for key in tensors:
        if targets and key.endswith(A):
            stem = key.removesuffix(A)
            module = stem
            while module.endswith(_WITHIN):
                module = module.removesuffix(_WITHIN)
            wrappers[module].append(stem)
    found = {}
    for module, stems in wrappers.items():
        leaves = {
            leaf for target in targets if _is_of(module, target.rpartition(".")[0] or "experts")
            for leaf in [target.rpartition(".")[2]] if leaf != "weight"
        }  # fmt: skip
        if not leaves:
            continue
        known = [leaf for leaf in _INNERMOST_FIRST if leaf in leaves]
        if len(known) != len(leaves) or len(stems) != len(leaves):
            raise ConfigError(
                f"{path}: of {module}, whose {', '.join(sorted(leaves))} target_parameters names, "
                f"it has {len(stems)} factors; known are {', '.join(_INNERMOST_FIRST)}: send the "
                "trainer's PEFT model by update_weights"
            )
        for leaf, stem in zip(known, sorted(stems, key=len, reverse=True), strict=True):
            found[f"{module}.{leaf}"] = stem
    return found


def _is_of(module: str, end: str) -> bool:
    return module == end or module.endswith(f".{end}")


def _one_by_one(
    tensors: dict[str, Tensor], scaling: Scaling, path: Path
) -> dict[str, dict[str, dict[int, Factors]]]:
    """By the module of all experts of a layer, linear and number."""
    found: dict[str, dict[str, dict[int, Factors]]] = defaultdict(lambda: defaultdict(dict))
    known = {linear for names in EXPERT_NAMES for linear in names.linears}
    for key in list(tensors):
        match = _ONE.fullmatch(key)
        if match is None or match[3] not in known:
            continue
        stem = key.removesuffix(A)
        down, up = tensors.pop(key), tensors.pop(stem + B, None)
        if up is None or down.dim() != 2 or up.dim() != 2 or up.shape[1] != len(down):
            raise ConfigError(f"{path}: {key} has no {B[1:]} that fits it")
        found[match[1]][match[3]][int(match[2])] = down, up, scaling(stem, len(down))
    return found


def _stacked(
    linears: Mapping[str, Mapping[int, Factors]], where: str
) -> list[tuple[str, tuple[Tensor, Tensor, ModuleSpec]]]:
    """Of both parameters of a layer, those that change. What gate and up share in a stack is the
    input alone: it has the ranks of both, each of which counts in its own half.
    """
    count = 1 + max(index for of in linears.values() for index in of)
    names = next((n for n in EXPERT_NAMES if not linears.keys() - set(n.linears)), None)
    if names is None:
        raise ConfigError(f"{where} has {', '.join(sorted(linears))}, of two kinds of experts")
    found = []
    for leaf, parts in (("gate_up_proj", (names.gate, names.up)), ("down_proj", (names.down,))):
        held = [linears.get(part, {}) for part in parts]
        if any(held):
            found.append((leaf, _joined(held, count, where)))
    return found


def _joined(
    held: Sequence[Mapping[int, Factors]], count: int, where: str
) -> tuple[Tensor, Tensor, ModuleSpec]:
    every = [factors for part in held for factors in part.values()]
    (down, up, scaling), (rows, inputs) = every[0], (len(every[0][1]), every[0][0].shape[1])
    if any(a.shape[1] != inputs or len(b) != rows for a, b, _ in every):
        raise ConfigError(f"{where}: experts of different shapes")
    ranks = [max((len(a) for a, _, _ in part.values()), default=0) for part in held]
    a = down.new_zeros(count, sum(ranks), inputs)
    b = up.new_zeros(len(held) * rows, sum(ranks), count)
    at = 0
    for index, (part, rank) in enumerate(zip(held, ranks, strict=True)):
        for expert, (one, other, own) in part.items():
            a[expert, at : at + len(one)] = one
            more = own / scaling if scaling else 1.0
            half = b[index * rows : (index + 1) * rows, :, expert]
            half[:, at : at + len(one)] = other if more == 1.0 else other * more
        at += rank
    spec = ModuleSpec(rank=sum(ranks), scaling=scaling, kind=EXPERTS)
    return a.flatten(0, 1), b.flatten(1), spec
