"""What the stages of a pipeline hand on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.distributed.stage import Stage
from rollout.models.config.stage_layers import stage_layers
from rollout.models.forward import ForwardBatch, RoutedExperts
from rollout.models.layers.base import Build


class HandedOn:
    """A stage's part of that: what it takes of the one before, and gives to the one behind.

    Of each token that is what the last block made and the residual sum beside it, [tokens, hidden]
    each; the last stage gives those of the rows that are wanted. Of a mixture the ranks in line
    with the one that answers hand on, too, what tokens were routed to behind the first stage,
    int16 [tokens, layers, experts of a token]. ``sparse``: for each layer of the model whether it
    has experts that are told. ``gives_all``: the last stage gives all rows, as somebody keeps what
    is made of them.
    """

    gives_all = False

    def __init__(self, build: Build, sparse: Sequence[bool]) -> None:
        self._build, self._stage = build, build.stage
        own = stage_layers(build.config, build.stage)
        first = stage_layers(build.config, Stage(0, build.stage.count))
        self._before = sum(sparse[: own.start])
        self._tells = any(sparse) and build.tp.rank == 0
        coming = sparse[first.stop :] if build.stage.is_first else sparse[first.stop : own.start]
        self._coming = sum(coming) if self._tells else 0

    def experts(self, batch: ForwardBatch) -> RoutedExperts | None:
        """As of ``RoutedExperts.of``, of the layers here."""
        wanted = self._tells or batch.forced_experts is not None
        return RoutedExperts(batch.forced_experts, self._before) if wanted else None

    def take(self, rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Both states of so many rows, and the experts of so many tokens, where any come."""
        build, size = self._build, (2, rows, self._build.config.hidden_size)
        both = torch.empty(size, dtype=build.dtype, device=build.device)
        self._stage.take(both)
        x, residual = both.unbind()
        if not self._coming:
            return x, residual, None
        assert build.config.moe is not None
        each = self._coming, build.config.moe.experts_per_token
        chosen = torch.empty(tokens, *each, dtype=torch.int16, device=build.device)
        self._stage.take(chosen)
        return x, residual, chosen

    def give(
        self, batch: ForwardBatch, x: Tensor, residual: Tensor, *chosen: Tensor | None
    ) -> None:
        """``chosen``: experts that came, and those of the layers here; of the first stage none."""
        if self._stage.is_last and not self.gives_all:
            x, residual = x[batch.logit_rows], residual[batch.logit_rows]
        self._stage.give(torch.stack((x, residual)))  # one message: each costs more than its bytes
        told = [each.to(torch.int16) for each in chosen if each is not None]
        if self._tells and told:
            self._stage.give(torch.cat(told, 1))
