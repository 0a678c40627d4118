"""The factors of a short convolution over tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rollout.models.layers.base import Build, Layer
from rollout.weights import Box, WeightSlot


class ConvWeight(Layer):
    """``conv1d``: the factors of this rank's channels, ``weight`` [channels, 1, width] and, where
    there is one, ``bias`` [channels].

    ``parts``: of each kind of channels the number of all ranks, the first here and how many.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, build: Build, parts: Sequence[tuple[int, int, int]], width: int, bias: bool = False
    ) -> None:
        super().__init__(build)
        self.parts, self.width = parts, width
        channels = sum(count for *_, count in parts)
        self.declare("weight", (channels, 1, width))
        self.register_parameter("bias", None)
        if bias:
            self.declare("bias", (channels,))

    def slots(self, prefix: str) -> list[WeightSlot]:
        found, before, at = [], 0, 0
        everything = sum(rows for rows, *_ in self.parts)
        for rows, first, count in self.parts:
            start = before + first
            for name in self.specs:
                rest = (1, self.width) if name == "weight" else ()
                zeros = (0,) * len(rest)
                take = Box((start, *zeros), (start + count, *rest))
                put = Box((at, *zeros), (at + count, *rest))
                source = f"{prefix}.{name}"
                found.append(WeightSlot(source, (everything, *rest), take, source, put))
            before, at = before + rows, at + count
        return found
