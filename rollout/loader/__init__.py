"""Where ``(name, LazyTensor)`` streams come from: files, the hub, URLs, made-up values."""

from rollout.loader.checkpoint import Checkpoint, open_checkpoint, open_location
from rollout.loader.hub import (
    has_tokenizer,
    resolve_component,
    resolve_model,
    resolve_tokenizer,
)
from rollout.loader.registry import (
    Loader,
    LoadRequest,
    find_loader,
    known_formats,
    portable,
    register_loader,
)
from rollout.loader.remote import is_remote
from rollout.loader.sharded_state import complete_save, save_shard
from rollout.weights.files import Files

__all__ = [
    "Checkpoint",
    "Files",
    "LoadRequest",
    "Loader",
    "complete_save",
    "find_loader",
    "has_tokenizer",
    "is_remote",
    "known_formats",
    "open_checkpoint",
    "open_location",
    "portable",
    "register_loader",
    "resolve_component",
    "resolve_model",
    "resolve_tokenizer",
    "save_shard",
]
