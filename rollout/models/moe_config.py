"""The mixture of experts of a decoder, as its ``config.json`` has it."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.errors import ConfigError
from rollout.models.arch import MoEArch
from rollout.models.config_reader import Reader
from rollout.weights.fused_experts import PROJ_NAMES, ExpertNames


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The mixture of experts of a decoder; sizes are of one expert; see ``MoEArch``.

    ``shared_size``: inner size of the expert that every token passes, 0 where there is none.
    """

    num_experts: int
    experts_per_token: int
    norm_topk_prob: bool
    expert_size: int
    shared_size: int = 0
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    wide_weights: bool = False
    names: ExpertNames = PROJ_NAMES

    def is_sparse(self, layer: int) -> bool:
        """Whether layer number ``layer`` has experts instead of one dense feed-forward."""
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


def read_moe(read: Reader, arch: MoEArch) -> MoEConfig:
    """The experts; a field that shapes them has no default."""
    values, file = read.values, read.file
    # Both names are about: transformers maps one to the other.
    names = (arch.count, "num_experts", "num_local_experts")
    count = next((n for n in names if values.get(n) is not None), arch.count)
    dense = () if arch.every_layer else values.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
        raise ConfigError(f"{file}: mlp_only_layers must be a list of layers, got {dense!r}")
    norm_topk_prob = arch.norm_topk_prob
    if norm_topk_prob is None:
        read.required("norm_topk_prob")
        norm_topk_prob = read.flag("norm_topk_prob")
    moe = MoEConfig(
        num_experts=read.count(count),
        experts_per_token=read.count("num_experts_per_tok"),
        norm_topk_prob=norm_topk_prob,
        expert_size=read.count(arch.size),
        shared_size=read.count(arch.shared_size) if arch.shared_size else 0,
        sparse_step=1 if arch.every_layer else read.count("decoder_sparse_step"),
        dense_layers=tuple(dense),
        wide_weights=arch.wide_weights,
        names=arch.names,
    )
    if moe.experts_per_token > moe.num_experts:
        raise ConfigError(
            f"{file}: num_experts_per_tok {moe.experts_per_token} is more than the "
            f"{moe.num_experts} experts of {count}"
        )
    return moe
