"""Root-mean-square normalisation, replicated on every rank."""

from __future__ import annotations

from torch import Tensor

from rollout.kernels import add_rms_norm, rms_norm
from rollout.models.layers.base import Build, Layer, whole_slot
from rollout.weights import WeightSlot


class RMSNorm(Layer):
    """Normalise the last dimension in float32, cast, then scale by ``weight``.

    ``eps``: by default the config's.
    """

    weight: Tensor

    def __init__(self, build: Build, size: int, eps: float | None = None) -> None:
        super().__init__(build)
        self.eps = build.config.rms_norm_eps if eps is None else eps
        self.declare("weight", (size,))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def slots(self, prefix: str) -> list[WeightSlot]:
        name = f"{prefix}.weight"
        return [whole_slot(name, self.specs["weight"].shape, name)]
