"""Names: from how a trainer holds its parameters to how a checkpoint file spells them.

Wrappers put whole components into a name (``_orig_mod`` of torch.compile, ``_fsdp_wrapped_module``,
``_checkpoint_wrapped_module``, a leading ``module`` of DDP), and so does PEFT (a leading
``base_model.model``, ``base_layer``); only whole components are removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from rollout.errors import WeightMismatch
from rollout.wire.spellings import near

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# What PEFT puts beside the weights it adapts: meaningless to an engine, but merged into them.
ADAPTER = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "modules_to_save"})
# Of a cache, for whole tensors: here each token has its own.
CACHE_SCALES = ("k_scale", "v_scale")
# Derived from the configuration, never trained; some old checkpoints and models still carry it.
DERIVED = frozenset({"inv_freq", *CACHE_SCALES})
# Held in float32 by trainers, and read so here: steps of their training are lost in bfloat16. They
# are added to scores, say how a state goes on, or are the norms of DoRA.
WIDE = frozenset({"e_score_correction_bias", "A_log", "dt_bias", "D", "lora_magnitude_vector"})

# Of a causal language model, as files of most architectures spell them.
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@lru_cache(maxsize=1 << 16)  # every update asks for the same names
def file_form(name: str) -> str:
    """``name`` without the components that wrappers and PEFT added.

    Raises ``WeightMismatch`` for a tensor of an adapter: names alone do not say how to merge it.
    """
    parts = unwrapped(name).split(".")
    if len(parts) > 2 and parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    if not ADAPTER.isdisjoint(parts):
        raise WeightMismatch(
            f"{name!r} belongs to an adapter; pass the PEFT model itself, which is sent merged, "
            "or merge it and leave the adapter's own tensors out; to serve it beside the model, "
            'update_weights(adapters={"NAME": the PEFT model or its directory})'
        )
    return ".".join(part for part in parts if part != "base_layer")


def unwrapped(name: str) -> str:
    """``name`` without the components that wrappers added."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts.pop(0)
    return ".".join(parts)


def placed(name: str, prefixes: Mapping[str, str]) -> str | None:
    """``name`` as a model within another one knows it; None where it takes no such tensor.

    ``prefixes``: what a name begins with (whole components, a dot behind them), or all of it
    (without that dot) -> what stands there instead; "": it is no tensor of this model's.
    """
    for prefix, own in prefixes.items():
        if name.startswith(prefix) if prefix.endswith(".") else name == prefix:
            return own + name.removeprefix(prefix) if own else None
    return name


def is_weight(name: str) -> bool:
    """Whether a tensor of this name is of the weights; rope tables and caches' scales are not."""
    return name.rsplit(".", 1)[-1] not in DERIVED


def weight_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What a tensor of this name is held and sent as where the others are of ``dtype``."""
    wide = name.rsplit(".", 1)[-1] in WIDE and dtype.itemsize < torch.float32.itemsize
    return torch.float32 if wide else dtype


def is_idle_bias(name: str, known: Container[str], read: Callable[[], Tensor]) -> bool:
    """Whether ``name`` is a bias of zeros of a linear that has none, as GPTQ's tools write them."""
    stem = name.removesuffix(".bias")
    if stem == name or name in known or f"{stem}.weight" not in known:
        return False
    return not bool(read().any())


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``: first by its words, then by its numbers; or None.

    Names that differ in numbers alone are one candidate, so that thousands of experts cost little.
    """
    patterns: dict[str, list[str]] = defaultdict(list)
    for one in known:
        patterns[_words(one)].append(one)
    if (pattern := near(_words(name), patterns)) is None:
        return None
    wanted = _numbers(name)

    def distance(one: str) -> list[int]:
        return [abs(a - b) for a, b in zip(_numbers(one), wanted, strict=False)]

    return min(patterns[pattern], key=distance)


def _words(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdecimal()]
