"""What a source of one's own implements: see docs/weight_sync.md."""

from rollout.weight_sync.trainer.sources.base import (
    HeldSource,
    LocalSource,
    PlacingSource,
    WeightSource,
)

__all__ = ["HeldSource", "LocalSource", "PlacingSource", "WeightSource"]
