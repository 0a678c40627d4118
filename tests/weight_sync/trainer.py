"""A sender of the in-process rig, and weights that differ in a few elements."""

from __future__ import annotations

import torch
from engine_ranks import Engine

from rollout.weight_sync.protocol.committed import DeltaBase
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.transports.inline import Inline

BUCKET = 32 << 10
DEADLINE = 10.0


class By(Inline):
    """``inline`` with a sender of the test's own."""

    def __init__(self, sender) -> None:
        self._sender = sender

    def open(self, opening):
        return self._sender


class Trainer:
    """A sender with its memory of what it committed."""

    def __init__(self, engine: Engine, transport) -> None:
        self.engine, self.transport, self.base = engine, transport, DeltaBase()

    def send(self, weights, *, transport=None, link=None, **options):
        options = {"bucket_bytes": BUCKET, "timeout": DEADLINE, **options}
        return publish(
            weights,
            connect=lambda: link or self.engine,
            options=UpdateOptions(transport=transport or self.transport, **options),
            base=self.base,
        )


def nudged(weights, fraction: float, seed: int = 0) -> dict[str, torch.Tensor]:
    """Other values for so many of the elements of each tensor."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in weights.items():
        changed = torch.rand(tensor.shape, generator=generator) < fraction
        result[name] = torch.where(changed, tensor + 0.125, tensor)
    return result


def fresh(engine, checkpoints, layout, weights):
    other = Engine(checkpoints[0], len(engine.ranks), weights, layout)
    try:
        return other.live()
    finally:
        other.close()
