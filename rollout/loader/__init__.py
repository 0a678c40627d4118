"""Where ``(name, LazyTensor)`` streams come from: checkpoint files, the hub, made-up values."""

from rollout.loader.checkpoint import Checkpoint, open_checkpoint, open_directory
from rollout.loader.hub import resolve_model

__all__ = ["Checkpoint", "open_checkpoint", "open_directory", "resolve_model"]
