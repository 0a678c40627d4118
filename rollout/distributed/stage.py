"""Pipeline parallelism: which layers a rank runs, and how states get to the rank that goes on.

The stages are a ring: the first has the embedding, its layers, the last norm and the head, and what
the last one makes comes back to it. So the rank that samples is the first one, as without stages,
and a head that is tied to the embedding lies once.

    ids -> stage 0: embedding, layers -> stage 1: layers -> ... -> stage 0: norm, head -> logits

Ranks are numbered stage by stage; those of equal places in their stages are a ring of their own, as
the states are whole on every rank of a stage. What decides how a step runs (in parts, captured)
has to be the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rollout.distributed import TensorParallel
from rollout.distributed.rendezvous import Rendezvous


@dataclass(slots=True)
class Stage:
    """A rank's place in a pipeline of ``count`` stages.

    ``links``: raw groups of two, a giver and a taker, by the stage that gives; none are needed to
    build a stage's model.
    """

    index: int = 0
    count: int = 1
    links: dict[int, Any] = field(default_factory=dict)
    _under_way: list[tuple[Any, Tensor]] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def rank(self, tp: TensorParallel) -> int:
        """The number of a rank of this stage among all ranks."""
        return self.index * tp.size + tp.rank

    def connect(
        self, join: Callable[[Rendezvous, int, str], Any], where: Rendezvous, at: int
    ) -> None:
        """Form the links with the ranks that have the place ``at`` in their stages, too.

        Collective over all ranks. ``join(where, rank, tag)`` forms one group.
        """
        pair = replace(where, size=2)
        for giver in range(self.count):
            taker = (giver + 1) % self.count
            if self.index in (giver, taker):
                rank = int(self.index == taker)
                self.links[giver] = join(pair, rank, f"stage-{giver}-{at}")

    def give(self, tensor: Tensor) -> None:
        """Send to the stage behind this one, which takes what it is given in the same order.
        Nothing may be written there until ``settle``: the other stage may be busy until then.
        """
        if tensor.numel():
            self._under_way.append((self._bring(self.index, tensor), tensor))

    def take(self, tensor: Tensor) -> None:
        """Receive from the stage before this one, into ``tensor``."""
        if tensor.numel():
            self._bring((self.index - 1) % self.count, tensor).wait()

    def settle(self) -> None:
        """Wait until all that was given has been sent."""
        under_way, self._under_way = self._under_way, []
        for work, _ in under_way:
            work.wait()

    def _bring(self, giver: int, tensor: Tensor) -> Any:
        """A broadcast in a group of two: its communicator is there before the first step, where
        NCCL makes one for a pair that sends when it first does.
        """
        assert tensor.is_contiguous()
        return self.links[giver].broadcast(tensor.view(torch.uint8), 0)


def place_of(rank: int, tp_size: int, stages: int) -> tuple[TensorParallel, Stage]:
    """Of the ranks of ``stages`` of ``tp_size`` each that of number ``rank``."""
    return TensorParallel(rank % tp_size, tp_size), Stage(rank // tp_size, stages)
