"""The sizes of gated delta nets, as a ``config.json`` has them."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.errors import ConfigError
from rollout.models.config_reader import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Heads of all ranks: each key head is shared by ``heads / key_heads`` value heads in a row.

    ``width``: inputs of the convolution before them.
    """

    key_heads: int
    heads: int
    key_dim: int
    dim: int
    width: int

    def state_shapes(self, ranks: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Of one sequence in one layer on each of ``ranks``: what the convolution needs, in the
        model's dtype, and the recurrent state in float32; ``LayerKV`` has both by slot."""
        channels, heads = sum(self.parts) // ranks, self.heads // ranks
        return (channels, self.width - 1), (heads, self.key_dim, self.dim)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of all queries, keys and values, which are convolved."""
        return self.key_heads * self.key_dim, self.key_heads * self.key_dim, self.heads * self.dim


def read_delta(read: Reader) -> DeltaConfig:
    """Fields have the defaults of transformers, which older files rely on."""
    key_heads = read.count("linear_num_key_heads", 16)
    heads = read.count("linear_num_value_heads", 32)
    if heads % key_heads:
        raise ConfigError(
            f"{read.file}: linear_num_value_heads {heads} must be a multiple of "
            f"linear_num_key_heads {key_heads}"
        )
    return DeltaConfig(
        key_heads=key_heads,
        heads=heads,
        key_dim=read.count("linear_key_head_dim", 128),
        dim=read.count("linear_value_head_dim", 128),
        width=read.count("linear_conv_kernel_dim", 4, least=2),
    )
