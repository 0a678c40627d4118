"""The sizes of gated delta nets, as a ``config.json`` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import ConfigError
from rollout.models.arch import DeltaArch
from rollout.models.config.reader import Reader

KINDS = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Heads of all ranks: each key head is shared by ``heads / key_heads`` value heads in a row.

    ``width``: inputs of the convolution before them. ``most``: of what is learnt of a token.
    """

    key_heads: int
    heads: int
    key_dim: int
    dim: int
    width: int
    most: float = 1.0

    def state_shapes(self, ranks: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Of one sequence in one layer on each of ``ranks``: what the convolution needs, in the
        model's dtype, and the recurrent state in float32; ``LayerKV`` has both by slot."""
        channels, heads = sum(self.parts) // ranks, self.heads // ranks
        return (channels, self.width - 1), (heads, self.key_dim, self.dim)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of all queries, keys and values, which are convolved."""
        return self.key_heads * self.key_dim, self.key_heads * self.key_dim, self.heads * self.dim


def read_delta(read: Reader, arch: DeltaArch) -> DeltaConfig:
    """Fields have the defaults of transformers, which older files rely on."""
    most = 2.0 if read.switch(arch.doubled) else 1.0
    width = read.count("linear_conv_kernel_dim", 4, least=2)
    if arch.by_row:
        heads, dim = read.count("linear_num_heads", 32), read.count("linear_head_dim", 128)
        return DeltaConfig(
            key_heads=heads, heads=heads, key_dim=dim, dim=dim, width=width, most=most
        )
    usual = read.count("num_attention_heads")
    key_heads = read.count("linear_num_key_heads", usual if arch.apart else 16)
    heads = read.count("linear_num_value_heads", usual if arch.apart else 32)
    if heads % key_heads:
        raise ConfigError(
            f"{read.file}: linear_num_value_heads {heads} must be a multiple of "
            f"linear_num_key_heads {key_heads}"
        )
    narrow = 3 * read.count("hidden_size") // (4 * key_heads)
    key_dim = read.count("linear_key_head_dim", narrow if arch.apart else 128)
    return DeltaConfig(
        key_heads=key_heads,
        heads=heads,
        key_dim=key_dim,
        dim=read.count("linear_value_head_dim", 2 * key_dim if arch.apart else 128),
        width=width,
        most=most,
    )


def with_linear(values: Mapping[str, Any], file: str) -> dict[str, Any]:
    """``values`` with what Kimi's files have in ``linear_attn_config`` where transformers has it:
    sizes, and ``layer_types`` of lists that count layers from 1."""
    read = Reader(values, file)
    inner, found = read.mapping("linear_attn_config"), dict(values)
    for theirs, ours in (
        ("head_dim", "linear_head_dim"),
        ("num_heads", "linear_num_heads"),
        ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    ):
        if inner.get(theirs) is not None:
            found[ours] = inner[theirs]
    if not found.get("layer_types"):
        found["layer_types"] = _listed(inner, read.count("num_hidden_layers"), file)
    if found.get("mlp_layer_types") is None:
        found.setdefault("first_k_dense_replace", 1)
    return found


def _listed(inner: Mapping[str, Any], layers: int, file: str) -> list[str]:
    """The kinds of layers by both lists; without one of them, as transformers has it."""
    if any(inner.get(name) is None for name in KINDS):
        every = range(layers)
        return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in every]
    for name in KINDS:
        if not isinstance(inner[name], list) or any(type(one) is not int for one in inner[name]):
            raise ConfigError(
                f"{file}: {name} of linear_attn_config must be a list of integers, got "
                f"{inner[name]!r}"
            )
    if sorted(one for name in KINDS for one in inner[name]) != list(range(1, layers + 1)):
        raise ConfigError(
            f"{file}: {' and '.join(KINDS)} of linear_attn_config must name each of the layers 1 "
            f"to {layers} once"
        )
    kinds = {number: kind for name, kind in KINDS.items() for number in inner[name]}
    return [kinds[number] for number in range(1, layers + 1)]
