"""The sizes of latent attention, as a ``config.json`` has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import ConfigError
from rollout.models.arch import IndexArch, LatentArch
from rollout.models.config.reader import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """An index of ``heads`` queries and one key of ``dim`` a token: a query attends to the ``most``
    tokens that it scores highest. ``layers``: the numbers of those that have one; the others attend
    to what the last of them before chose.
    """

    heads: int
    dim: int
    most: int
    interleaved: bool
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Keys and values of a token are made of one latent vector, which is what is cached.

    ``rank``: of that vector; ``rope_dim``: of the key part that turns, which all heads share;
    ``nope_dim``: of the part that does not; ``value_dim``: of a head's values. ``q_rank``: queries
    are made of a vector of that size, None: of the hidden state. ``scale``: of the scores.
    ``index``: of sparse attention.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int | None
    interleaved: bool
    scale: float
    index: IndexConfig | None = None

    @property
    def cached(self) -> int:
        """Elements of a token in the cache: [the turned key part, the latent vector]."""
        return self.rope_dim + self.rank


def read_latent(read: Reader, arch: LatentArch, rope: Mapping[str, Any]) -> LatentConfig:
    """``rope``: what scales positions; yarn sharpens the scores, too."""
    rope_dim, nope_dim = read.count("qk_rope_head_dim"), read.count("qk_nope_head_dim")
    if rope_dim % 2:
        raise ConfigError(
            f"{read.file}: qk_rope_head_dim {rope_dim} is odd; rotary embedding needs pairs"
        )
    sharper = 1.0
    if (weight := rope.get("mscale_all_dim")) and (factor := rope.get("factor", 1.0)) > 1:
        sharper = 0.1 * weight * math.log(factor) + 1.0
    return LatentConfig(
        rank=read.count("kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=read.count("v_head_dim"),
        q_rank=None if read.values.get("q_lora_rank") is None else read.count("q_lora_rank"),
        interleaved=read.switch(arch.interleaved),
        scale=(rope_dim + nope_dim) ** -0.5 * sharper**2,
        index=None if arch.index is None else _read_index(read, arch.index, rope_dim),
    )


def _read_index(read: Reader, arch: IndexArch, rope_dim: int) -> IndexConfig:
    read.required("q_lora_rank")  # its queries are made of that vector
    dim = read.count("index_head_dim")
    if dim < rope_dim:
        raise ConfigError(
            f"{read.file}: index_head_dim {dim} is less than qk_rope_head_dim {rope_dim}, the part "
            "of it that turns"
        )
    return IndexConfig(
        heads=read.count("index_n_heads"),
        dim=dim,
        most=read.count("index_topk"),
        interleaved=arch.interleaved,
        layers=_indexed_layers(read, arch.shared),
    )


def _indexed_layers(read: Reader, shared: bool) -> tuple[int, ...]:
    """Listed, by the letters of a pattern, or every so many layers from an offset on."""
    count = read.count("num_hidden_layers")
    if not shared:
        return tuple(range(count))
    given = read.values.get("indexer_types")
    name = "index_topk_pattern" if given is None else "indexer_types"
    given = read.values.get("index_topk_pattern") if given is None else given
    if given is None:
        every = max(1, read.count("index_topk_freq", 1, least=0))
        skip = read.count("index_skip_topk_offset", 2, least=0) - 1
        found = tuple(i for i in range(count) if max(i - skip, 0) % every == 0)
    else:
        letters = {"F": "full", "S": "shared"}
        kinds = (
            [letters.get(str(kind), kind) for kind in given]
            if isinstance(given, list | str)
            else []
        )
        if len(kinds) < count or not all(kind in ("full", "shared") for kind in kinds):
            raise read.wrong(name, f'"full" or "shared" for each of {count} layers', given)
        found = tuple(i for i in range(count) if kinds[i] == "full")
    if found[:1] != (0,):
        raise ConfigError(
            f"{read.file}: the first layer has no index, and none before it to share; see "
            "indexer_types, index_topk_pattern and index_skip_topk_offset"
        )
    return found
