"""Normalisation of hidden states and of heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rollout.kernels import add_rms_norm, rms_norm
from rollout.models.layers.base import Build, Layer, rows_slot, whole_slot
from rollout.weights import WeightSlot

OFFSETS = {"rms": None, "rms wide": 0.0, "rms plus one": 1.0}  # of the op


def make_norm(build: Build, size: int) -> Norm:
    """The norm that the architecture declares, over ``size`` elements, replicated on every rank."""
    return LayerNorm(build, size) if build.config.arch.norm == "layer" else RMSNorm(build, size)


class Norm(Layer):
    """Normalise the last dimension in float32, and scale by ``weight``.

    ``eps``: by default the config's.
    """

    weight: Tensor

    def __init__(self, build: Build, size: int, eps: float | None = None) -> None:
        super().__init__(build)
        self.eps = build.config.norm_eps if eps is None else eps
        self.declare("weight", (size,))

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        raise NotImplementedError

    def slots(self, prefix: str) -> list[WeightSlot]:
        name = f"{prefix}.weight"
        return [whole_slot(name, self.specs["weight"].shape, name)]


class RMSNorm(Norm):
    """By the root of the mean square."""

    def __init__(self, build: Build, size: int, eps: float | None = None) -> None:
        super().__init__(build, size, eps)
        self.offset = OFFSETS[build.config.arch.norm]

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, self.weight, self.eps, self.offset)


class LayerNorm(Norm):
    """By mean and variance; plus a bias where the architecture has one."""

    bias: Tensor

    def __init__(
        self, build: Build, size: int, eps: float | None = None, *, bias: bool = False
    ) -> None:
        super().__init__(build, size, eps)
        self.has_bias = bias or build.config.arch.norm_bias
        if self.has_bias:
            self.declare("bias", (size,))

    def forward(self, x: Tensor) -> Tensor:
        return standardise(x, self.weight, self.eps, self.bias if self.has_bias else None)

    def slots(self, prefix: str) -> list[WeightSlot]:
        found = super().slots(prefix)
        name = f"{prefix}.bias"
        return (
            [*found, whole_slot(name, self.specs["bias"].shape, name)] if self.has_bias else found
        )

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.forward(total), total


class UnitNorm(nn.Module):
    """By the root of the mean square, without a weight. Turning commutes with it."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class HeadsNorm(Layer):
    """A mean-and-variance norm of each head [T, heads here, head_dim] by a weight of its own."""

    weight: Tensor

    def __init__(self, build: Build, total: int, first: int, count: int) -> None:
        super().__init__(build)
        self.eps, self.total, self.first = build.config.norm_eps, total, first
        self.declare("weight", (count, build.config.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        return standardise(x, self.weight, self.eps)

    def slots(self, prefix: str) -> list[WeightSlot]:
        count, dim = self.specs["weight"].shape
        name = f"{prefix}.weight"
        return [rows_slot(name, (self.total, dim), self.first, count, name, 0)]


class RowNorm(Layer):
    """A root-mean-square norm over the heads of all ranks: [T, elements here] and their squares.

    ``squares``: [T, 1] float32, the sum of the squares of all ``total`` elements.
    """

    weight: Tensor

    def __init__(self, build: Build, total: int, first: int, count: int) -> None:
        super().__init__(build)
        self.eps, self.total, self.first = build.config.norm_eps, total, first
        self.offset = OFFSETS[build.config.arch.norm]
        self.declare("weight", (count,))

    def whole(self, x: Tensor) -> Tensor:
        """Where this rank has all elements."""
        return rms_norm(x, self.weight, self.eps, self.offset)

    def part(self, x: Tensor, squares: Tensor, weight: Tensor | None = None) -> Tensor:
        """``weight``: in the place of this layer's own."""
        weight = self.weight if weight is None else weight
        wide = x.float() * torch.rsqrt(squares / self.total + self.eps)
        if self.offset is None:
            return weight * wide.to(x.dtype)
        return (wide * (weight.float() + self.offset)).to(x.dtype)

    def slots(self, prefix: str) -> list[WeightSlot]:
        (count,) = self.specs["weight"].shape
        name = f"{prefix}.weight"
        return [rows_slot(name, (self.total,), self.first, count, name, 0)]


def standardise(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """x by the mean and variance of its last dimension, in float32, times ``weight``."""
    wide = x.float() if x.dtype != torch.float64 else x
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    out = weight.to(wide.dtype) * scaled
    return (out if bias is None else out + bias.to(wide.dtype)).to(x.dtype)
