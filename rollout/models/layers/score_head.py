"""The head of a sequence classifier or reward model."""

from __future__ import annotations

from torch import Tensor

from rollout.kernels import batch_invariant_linear, linear
from rollout.models.layers.base import Build, storage_of
from rollout.models.layers.linear import ReplicatedLinear
from rollout.weights import PLAIN


class ScoreHead(ReplicatedLinear):
    """[rows, hidden] -> [rows, labels] in float32, multiplied and summed in it; whole on every
    rank, without a bias.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build, build.config.hidden_size, len(build.config.labels))

    def forward(self, x: Tensor) -> Tensor:
        run = batch_invariant_linear if self.build.deterministic else linear
        rows, columns = self.specs["weight"].shape
        weight = storage_of(self, "weight").float()
        return run(x.float(), weight, None, PLAIN, (rows, columns))
