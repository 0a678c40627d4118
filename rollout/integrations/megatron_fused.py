"""What Megatron-Core's fused tensors are of, row by row: heads of attention, and of delta nets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rollout.errors import WeightMismatch
from rollout.integrations.megatron_parts import Part, Place, rows_from


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` rows from ``start`` on of a file's tensor of ``total`` rows."""

    name: str
    total: int
    start: int
    count: int


def fused(what: str, runs: Iterable[Run], tensor: Tensor, place: Place) -> list[Part]:
    """A tensor that holds an equal share of all rows that ``runs`` are, one behind the other,
    wherever in a run that begins and ends. ``what``: its name, in an error.
    """
    runs, (rank, size), (rows, *rest) = list(runs), place, tensor.shape
    if rows * size != (total := sum(run.count for run in runs)):
        raise WeightMismatch(
            f"{what} has {rows} rows on a rank; by the configuration's heads it has "
            f"{total / size:g}"
        )
    found, at, first = [], 0, rank * rows
    for run in runs:
        start, stop = max(at, first), min(at + run.count, first + rows)
        if start < stop:
            values = tensor[start - first : stop - first]
            to = run.start + start - at
            found.append(rows_from(run.name, (run.total, *rest), to, values))
        at += run.count
    return found


def query_groups(config: Mapping[str, Any], module: str, kind: str, gated: bool) -> Iterator[Run]:
    """All of ``linear_qkv``: by query group its queries, the gates of their output where attention
    is ``gated``, its key, its value (``megatron.core.transformer.attention``).

    Files have queries and gates in one tensor, in turns: one head's, then the next one's.
    """
    heads = int(config["num_attention_heads"])
    groups = int(config.get("num_key_value_heads") or heads)
    dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    each = heads // groups
    for group in range(groups):
        first = group * each
        if gated:
            for half in range(2):
                for head in range(first, first + each):
                    to = (2 * head + half) * dim
                    yield Run(f"{module}.q_proj.{kind}", 2 * heads * dim, to, dim)
        else:
            yield Run(f"{module}.q_proj.{kind}", heads * dim, first * dim, each * dim)
        for linear in ("k_proj", "v_proj"):
            yield Run(f"{module}.{linear}.{kind}", groups * dim, group * dim, dim)


def delta_heads(
    config: Mapping[str, Any], module: str, name: str, by_head: bool, tp: Place
) -> Iterator[Run]:
    """All that one rank has of ``in_proj``: of its heads q, then k, v, z, b and a; or of
    ``conv1d``: q, k and v (``megatron.core.ssm.gated_delta_net``).

    Each rank has whole key heads with the value heads that share them. Files have ``in_proj`` in
    two tensors ``by_head``, one key head's rows after another's, or in four, q of all heads before
    k.
    """
    keys, values = (int(config[f"linear_num_{kind}_heads"]) for kind in ("key", "value"))
    key_dim, dim = (int(config[f"linear_{kind}_head_dim"]) for kind in ("key", "value"))
    each, (rank, size) = values // keys, tp
    rows = {"q": key_dim, "k": key_dim, "v": each * dim, "z": each * dim, "b": each, "a": each}
    mine = range(rank * keys // size, (rank + 1) * keys // size)
    split = ("qkvz", "ba") if by_head else ("qkv", "z", "b", "a")
    tensors = {"conv1d": "qkv"} if name == "conv1d" else {f"in_proj_{of}": of for of in split}
    for tensor, parts in tensors.items():
        wide, before = sum(rows[part] for part in parts), 0  # rows for one key head
        for part in parts:
            of, own = f"{module}.{tensor}.weight", rows[part]
            if by_head and name == "in_proj":
                for key in mine:
                    yield Run(of, keys * wide, key * wide + before, own)
            else:
                to = keys * before + mine.start * own
                yield Run(of, keys * wide, to, len(mine) * own)
            before += own
