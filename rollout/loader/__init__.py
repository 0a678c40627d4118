"""Where ``(name, LazyTensor)`` streams come from: checkpoint files, the hub, made-up values."""

from rollout.loader.checkpoint import Checkpoint, open_checkpoint
from rollout.loader.hub import resolve_model

__all__ = ["Checkpoint", "open_checkpoint", "resolve_model"]
