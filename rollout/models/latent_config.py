"""The sizes of latent attention, as a ``config.json`` has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import ConfigError
from rollout.models.arch import LatentArch
from rollout.models.config_reader import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Keys and values of a token are made of one latent vector, which is what is cached.

    ``rank``: of that vector; ``rope_dim``: of the key part that turns, which all heads share;
    ``nope_dim``: of the part that does not; ``value_dim``: of a head's values. ``q_rank``: queries
    are made of a vector of that size, None: of the hidden state. ``scale``: of the scores.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int | None
    interleaved: bool
    scale: float

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
    )
