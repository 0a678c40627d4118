"""The sizes of Mamba-2 layers, and which layers those are, as a ``config.json`` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import ConfigError
from rollout.models.arch import MambaArch
from rollout.models.config.reader import Reader, shown

# What files call a kind of layer -> what transformers 5 calls it.
KINDS = {
    "mamba": "linear_attention",
    "linear_attention": "linear_attention",
    "attention": "full_attention",
    "full_attention": "full_attention",
    "mlp": "mlp",
    "moe": "moe",
}
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """Heads of all ranks: each of ``groups`` is shared by ``heads / groups`` heads in a row.

    ``width``: inputs of the convolution. ``steps``: the least and the largest of a token. ``ends``:
    factors on what a layer reads and makes, ``parts`` on those of its first projection.
    """

    heads: int
    dim: int
    groups: int
    state: int
    width: int
    conv_bias: bool
    bias: bool
    out_bias: bool
    steps: tuple[float, float]
    normed: bool = True
    norm_first: bool = False
    ends: tuple[float, float] = (1.0, 1.0)
    parts: tuple[float, ...] = (1.0,) * 5

    def share(self, part: str, rank: int, ranks: int) -> tuple[int, int, int]:
        """Rows of all ranks, the first of ``rank`` and how many it has, of a "z", "x", "b", "c" or
        "dt". A group is held by all ranks that have heads of it."""
        if part in "bc":
            held = max(1, self.groups // ranks)
            first = rank * self.groups // ranks
            return self.groups * self.state, first * self.state, held * self.state
        rows = self.heads * (1 if part == "dt" else self.dim)
        return rows, rank * rows // ranks, rows // ranks

    def state_shapes(self, ranks: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Of one sequence in one layer on each of ``ranks``: what the convolution needs, in the
        model's dtype, and the recurrent state in float32; ``LayerKV`` has both by slot."""
        channels = sum(self.share(part, 0, ranks)[2] for part in "xbc")
        return (channels, self.width - 1), (self.heads // ranks, self.state, self.dim)

    def check_tensor_parallel(self, size: int) -> None:
        """Raise ``ConfigError`` where a rank would not have whole heads of whole groups."""
        if self.heads % size:
            raise ConfigError(
                f"Number of Mamba heads ({self.heads}) must be divisible by tensor parallel size "
                f"({size})."
            )
        if self.groups % size and size % self.groups:
            raise ConfigError(
                f"Number of Mamba groups ({self.groups}) must be divisible by tensor parallel size "
                f"({size}), or divide it (they are then replicated)."
            )


def read_mamba(read: Reader, arch: MambaArch) -> MambaConfig:
    """The sizes; a field that shapes them has no default."""
    heads, groups = read.count(arch.heads), read.count(arch.groups)
    if heads % groups:
        raise ConfigError(
            f"{read.file}: {arch.heads} {heads} must be a multiple of {arch.groups} {groups}"
        )
    name = "mamba_hidden_act" if read.values.get("mamba_hidden_act") else "hidden_act"
    if (activation := read.values.get(name) or "silu") not in ("silu", "swish"):
        raise ConfigError(
            f"{read.file}: {name} of Mamba layers must be silu, got {shown(activation)}"
        )
    dim = read.values.get(arch.dim)
    if dim == "auto":
        own = arch.inner if arch.inner and read.values.get(arch.inner) is not None else None
        inner = read.count(own) if own else read.count("mamba_expand") * read.count("hidden_size")
        dim = inner // heads
    else:
        dim = read.count(arch.dim)
    bias = read.switch(arch.bias)
    reads, makes, parts = arch.scales or (None, None, None)
    return MambaConfig(
        heads=heads,
        dim=dim,
        groups=groups,
        state=read.count(arch.state),
        width=read.count(arch.width, least=2),
        conv_bias=read.switch(arch.conv_bias),
        bias=bias,
        out_bias=bias if arch.out_bias is None else read.switch(arch.out_bias),
        steps=_read_steps(read, arch),
        normed=read.switch(arch.normed),
        norm_first=read.switch(arch.norm_first),
        ends=(read.factor(reads), read.factor(makes)),
        parts=read.factors(parts, 5),
    )


def _read_steps(read: Reader, arch: MambaArch) -> tuple[float, float]:
    if arch.least_step is not None:
        known = read.values.get(arch.least_step) is not None
        return read.number(arch.least_step) if known else 0.001, float("inf")
    given = read.values.get("time_step_limit")
    if given is None:
        return 0.0, float("inf")
    try:  # JSON has no infinity; transformers writes one as an object
        low, high = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in given)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{read.file}: time_step_limit must be two numbers, got {given!r}"
        ) from error
    return low, high


def with_kinds(values: Mapping[str, Any], file: str) -> dict[str, Any]:
    """``values`` whose ``layer_types`` are transformers', however the file says them."""
    own = "layer_types" if values.get("layer_types") else "layers_block_type"
    given = values.get(own)
    pattern = values.get("hybrid_override_pattern")
    if given is None and isinstance(pattern, str):
        given = [LETTERS.get(letter, letter) for letter in pattern]
    if given is None:
        layers = Reader(values, file).count("num_hidden_layers")
        attending = values.get("attn_layer_indices") or []
        if not isinstance(attending, list) or any(type(layer) is not int for layer in attending):
            raise ConfigError(
                f"{file}: attn_layer_indices must be a list of layers, got {attending!r:.100}"
            )
        given = ["attention" if layer in attending else "mamba" for layer in range(layers)]
    kinds = given if isinstance(given, list) else [given]
    unknown = [kind for kind in kinds if not isinstance(kind, str) or kind not in KINDS]
    if unknown or not isinstance(given, list):
        what = unknown[0] if unknown else given
        raise ConfigError(
            f"{file}: {own} has {what!r:.100}, which is not one of {', '.join(KINDS)}"
        )
    counted = {"num_hidden_layers": len(given), **values}
    return {**counted, "layer_types": [KINDS[kind] for kind in given]}
