"""The linear that scores the experts of a layer, and what is added to its scores."""

from __future__ import annotations

from torch import Tensor

from rollout.kernels import batch_invariant_linear, linear
from rollout.models.config.moe import MoEConfig
from rollout.models.layers.base import Build, sibling, storage_of, whole_slot
from rollout.models.layers.linear import ReplicatedLinear
from rollout.weights import PLAIN, WeightSlot

BIAS = "e_score_correction_bias"


class Router(ReplicatedLinear):
    """[T, hidden] -> logits of all experts, the same on every rank; see ``MoEArch``.

    ``e_score_correction_bias``: [experts], None where there is none; who routes adds it.
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, build: Build, moe: MoEConfig) -> None:
        hidden, bias = build.config.hidden_size, moe.arch.router_bias
        super().__init__(build, hidden, moe.num_experts, bias)
        self.arch = moe.arch
        self.register_parameter(BIAS, None)
        if moe.arch.score_bias is not None:
            self.declare(BIAS, (moe.num_experts,))

    def forward(self, x: Tensor) -> Tensor:
        if not self.arch.wide_router:
            return super().forward(x)
        rows, columns = self.specs["weight"].shape
        run = batch_invariant_linear if self.build.deterministic else linear
        return run(x.float(), storage_of(self, "weight").float(), None, PLAIN, (rows, columns))

    def slots(self, prefix: str) -> list[WeightSlot]:
        found = super().slots(prefix)
        if self.arch.score_bias is not None:
            param = f"{prefix}.{BIAS}"
            source = param if self.arch.score_bias == "gate" else sibling(prefix, BIAS)
            found.append(whole_slot(source, self.specs[BIAS].shape, param))
        return found
