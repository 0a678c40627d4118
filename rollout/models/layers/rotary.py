"""Rotary position tables of every kind these architectures use in transformers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.models.config import RopeConfig


class Rotary:
    """cos and sin by position, one table ``[max_len, 2, R]`` for all layers of a rank.

    R, the rotated dims, is ``head_dim x partial``; both halves of R repeat the same angles
    (half-split rotation). Computed in float32 and then cast, as transformers does. It holds no
    weight, so a live model and its shadow share it.

    ``dynamic`` and ``longrope`` depend on the sequence length in transformers, which re-chooses
    frequencies as a sequence grows and so disagrees with keys it cached before. Here the choice
    is made once, by ``max_len`` (the longest sequence the engine admits): every cached key stays
    valid, prefixes can be shared, and sequences are equal to transformers' whenever both choose
    the same frequencies. To serve exactly the short ones, set ``max_model_len`` to the
    original length.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_position_embeddings: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_len = max_len
        self.dim = int(head_dim * rope.partial)
        if self.dim % 2 or not 0 < self.dim <= head_dim:
            raise ConfigError(
                f"partial_rotary_factor {rope.partial} of head_dim {head_dim} rotates {self.dim} "
                "dims: it must give an even number from 2 to head_dim"
            )
        if device.type == "meta":
            self.table = torch.empty(max_len, 2, self.dim, dtype=dtype, device=device)
            return
        inverse, scale = frequencies(rope, self.dim, max_position_embeddings, max_len)
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse
        angles = torch.cat((angles, angles), dim=-1)[:, : self.dim]  # [max_len, R]
        table = torch.stack((angles.cos() * scale, angles.sin() * scale), dim=1)
        self.table = table.to(dtype).to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [T] below ``max_len`` -> cos [T, R], sin [T, R]."""
        cos, sin = self.table.index_select(0, positions).unbind(1)
        return cos.contiguous(), sin.contiguous()


def frequencies(
    rope: RopeConfig, dim: int, max_positions: int, max_len: int
) -> tuple[Tensor, float]:
    """Inverse frequencies [ceil(dim / 2)] float32 and the factor on cos and sin.

    ``max_positions`` is the config's ``max_position_embeddings``, ``max_len`` the longest sequence
    served. Formulas: transformers ``modeling_rope_utils``; the order of float operations is kept.
    """
    if rope.kind == "yarn":
        return _yarn(rope, dim, max_positions)
    if rope.kind == "longrope":
        return _longrope(rope, dim, max_positions, max_len)
    base, factor = rope.theta, rope.factor or 1.0
    if rope.kind == "dynamic":
        longest = max(max_len, max_positions)
        base *= ((factor * longest / max_positions) - (factor - 1)) ** (dim / (dim - 2))
    inverse = 1.0 / base ** _exponents(dim)
    if rope.kind == "linear":
        inverse /= factor
    if rope.kind == "llama3":
        inverse = _llama3(rope, inverse, max_positions)
    return inverse, 1.0


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).float() / dim


def _llama3(rope: RopeConfig, inverse: Tensor, max_positions: int) -> Tensor:
    """Long waves are divided by the factor, short ones kept, those between interpolated."""
    factor, low, high = rope.factor or 1.0, rope.low_freq_factor, rope.high_freq_factor
    old = rope.original_max or max_positions
    wave = 2 * math.pi / inverse
    scaled = torch.where(wave > old / low, inverse / factor, inverse)
    smooth = (old / wave - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wave < old / high) & ~(wave > old / low)
    return torch.where(between, smoothed, scaled)


def _yarn(rope: RopeConfig, dim: int, max_positions: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): a ramp between interpolated and original frequencies."""
    original = rope.original_max or max_positions
    factor = rope.factor if rope.factor is not None else max_positions / original

    def scale(mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    def dim_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    attention = rope.attention_factor
    if attention is None:
        both = rope.mscale and rope.mscale_all_dim
        attention = scale(rope.mscale or 1) / scale(rope.mscale_all_dim or 1) if both else scale()
    low, high = dim_of(rope.beta_fast or 32), dim_of(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    powers = rope.theta ** _exponents(dim)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    inverse = 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep
    return inverse, attention


def _longrope(rope: RopeConfig, dim: int, max_positions: int, max_len: int) -> tuple[Tensor, float]:
    """LongRoPE: per-dimension factors, one set for short and one for long sequences."""
    original = rope.original_max or max_positions
    factor = rope.factor if rope.factor is not None else max_positions / original
    attention = rope.attention_factor
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    chosen = rope.long_factor if max_len > original else rope.short_factor
    factors = torch.tensor(chosen, dtype=torch.float32)
    return 1.0 / (factors * rope.theta ** _exponents(dim)), attention
