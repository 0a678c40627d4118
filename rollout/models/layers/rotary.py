"""Rotary position tables of every kind these architectures use in transformers."""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.models.config.layer import RopeConfig

_AT_ONCE = 1 << 15  # positions


class Rotary:
    """cos and sin by position, one table ``[max_len, 2, R]`` for all layers of a rank.

    R, the rotated dims, is ``head_dim x partial``; both halves of R repeat the same angles
    (half-split rotation). Computed in float32 and then cast, as transformers does. It holds no
    weight, so a live model and its shadow share it. It is made at the first use.

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
        self.dim = 2 if rope.kind == "none" else int(head_dim * rope.partial)
        if self.dim % 2 or not 0 < self.dim <= head_dim:
            raise ConfigError(
                f"partial_rotary_factor {rope.partial} of head_dim {head_dim} rotates {self.dim} "
                "dims: it must give an even number from 2 to head_dim"
            )
        self.rows = max_len  # of the table: fewer where positions from there on are never asked for
        self._dtype, self._device = dtype, device
        self._frequencies = frequencies(rope, self.dim, max_position_embeddings, max_len)
        self.axes = torch.tensor((*rope.axes, *rope.axes), device=device)[: self.dim]  # [R]

    @cached_property
    def table(self) -> Tensor:
        """cos and sin [rows, 2, R], by position."""
        with torch.inference_mode(False):
            table = torch.empty(self.rows, 2, self.dim, dtype=self._dtype, device=self._device)
            inverse, scale = self._frequencies
            for first in range(0, self.rows, _AT_ONCE):
                positions = torch.arange(first, min(first + _AT_ONCE, self.rows)).float()
                angles = positions[:, None] * inverse
                angles = torch.cat((angles, angles), dim=-1)[:, : self.dim]  # [positions, R]
                turned = torch.stack((angles.cos() * scale, angles.sin() * scale), dim=1)
                table[first : first + len(positions)] = turned.to(self._dtype)
        return table

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [T] below ``max_len``, or [3, T] by axis -> cos [T, R], sin [T, R]."""
        if positions.dim() == 1:
            cos, sin = self.table.index_select(0, positions).unbind(1)
        else:
            pairs = torch.arange(self.dim, device=self.table.device)
            cos, sin = self.table[positions[self.axes].T, :, pairs].unbind(-1)
        return cos.contiguous(), sin.contiguous()


def frequencies(
    rope: RopeConfig, dim: int, max_positions: int, max_len: int
) -> tuple[Tensor, float]:
    """Inverse frequencies [ceil(dim / 2)] float32 and the factor on cos and sin.

    ``max_positions`` is the config's ``max_position_embeddings``, ``max_len`` the longest sequence
    served. Scaled kinds are transformers' own functions.
    """
    if rope.kind == "none":
        return torch.zeros(dim // 2), 1.0  # turned by an angle of 0: cos 1, sin 0
    if rope.kind == "default":
        steps = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / rope.theta**steps, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # slow to import

    config = SimpleNamespace(
        rope_parameters={
            "rope_type": rope.kind, "rope_theta": rope.theta, "factor": None, **rope.scaling
        },
        head_dim=dim,
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=max_positions,
        standardize_rope_params=lambda: None,
    )  # fmt: skip
    inverse, scale = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"), seq_len=max_len)
    if rope.kind == "longrope" and {"short_mscale", "long_mscale"} <= rope.scaling.keys():
        # Phi-MoE's own factors in the place of one that is computed.
        scale = float(
            rope.scaling["long_mscale" if rope.differs_up_to(max_len) else "short_mscale"]
        )
    return inverse, scale
