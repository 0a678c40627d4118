"""The mixture of experts of a decoder, as its ``config.json`` has it."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.errors import ConfigError
from rollout.models.arch import MoEArch
from rollout.models.config.reader import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The mixture of experts of a decoder; sizes are of one expert; ``arch`` has what is fixed.

    ``shared_size``: inner size of the expert that every token passes, 0 where there is none.
    ``groups``, ``top_groups``: experts are chosen within so many of them; 1 where there are none.
    """

    arch: MoEArch
    num_experts: int
    experts_per_token: int
    norm_topk_prob: bool
    expert_size: int
    shared_size: int = 0
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    groups: int = 1
    top_groups: int = 1
    scaling: float = 1.0
    clamped: tuple[float, float] | None = None
    narrow: int = 0  # elements that experts read and write, 0 for the hidden size
    nearness: float = 0.0  # of a logit to the best one, for the "mixer"

    def is_sparse(self, layer: int) -> bool:
        """Whether layer number ``layer`` has experts instead of one dense feed-forward."""
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


def read_moe(read: Reader, arch: MoEArch) -> MoEConfig | None:
    """The experts, None where there may be none; a field that shapes them has no default."""
    if arch.optional and read.values.get(arch.count) == 0:
        return None
    # All names are about: transformers maps one to the other.
    names = (arch.count, "num_experts", "num_local_experts", "n_routed_experts")
    count = next((n for n in names if read.values.get(n) is not None), arch.count)
    norm_topk_prob = arch.norm_topk_prob
    if norm_topk_prob is None:
        read.required("norm_topk_prob")
        norm_topk_prob = read.flag("norm_topk_prob")
    experts, chosen = read.count(count), read.count("num_experts_per_tok")
    if chosen > experts:
        raise ConfigError(
            f"{read.file}: num_experts_per_tok {chosen} is more than the {experts} experts of "
            f"{count}"
        )
    groups, top_groups = _read_groups(read, arch, experts, chosen)
    return MoEConfig(
        arch=arch,
        num_experts=experts,
        experts_per_token=chosen,
        norm_topk_prob=norm_topk_prob,
        expert_size=read.count(arch.size),
        shared_size=_read_shared(read, arch),
        sparse_step=_read_step(read, arch),
        dense_layers=_read_dense(read, arch),
        groups=groups,
        top_groups=top_groups,
        scaling=read.number("routed_scaling_factor") if arch.scaled else 1.0,
        clamped=_read_clamped(read, arch),
        narrow=read.count(arch.narrow, 0, least=0) if arch.narrow else 0,
        nearness=_read_nearness(read, chosen) if arch.scores == "mixer" else 0.0,
    )


def _read_nearness(read: Reader, chosen: int) -> float:
    if chosen != 2:
        raise ConfigError(f"{read.file}: num_experts_per_tok must be 2 here, got {chosen}")
    given = read.values.get("router_jitter_noise") is not None
    return 2 * (read.number("router_jitter_noise") if given else 0.01)


def _read_clamped(read: Reader, arch: MoEArch) -> tuple[float, float] | None:
    fields = arch.stacked and arch.stacked.clamped
    if not fields:
        return None
    (alpha, limit) = (
        default if read.values.get(name) is None else read.number(name) for name, default in fields
    )
    return alpha, limit


def _read_shared(read: Reader, arch: MoEArch) -> int:
    shared = arch.shared
    if shared is None:
        return 0
    return read.count(shared.size) * (read.count(shared.count) if shared.count else 1)


def _read_step(read: Reader, arch: MoEArch) -> int:
    listed = arch.sparse_layers is not None and read.values.get(arch.sparse_layers) is not None
    return 1 if arch.every_layer or listed else read.count(arch.sparse_step)


def _read_dense(read: Reader, arch: MoEArch) -> tuple[int, ...]:
    kinds = read.values.get("mlp_layer_types")
    if arch.first_dense and kinds is not None:
        kinds = read.names("mlp_layer_types")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if arch.first_dense:
        return tuple(range(read.count(arch.first_dense, least=0)))
    if (name := arch.sparse_layers) is not None:
        sparse = read.values.get(name)
        layers = range(read.count("num_hidden_layers"))
        if sparse is not None and not isinstance(sparse, list):
            raise ConfigError(f"{read.file}: {name} must be a list of layers, got {sparse!r}")
        return () if sparse is None else tuple(layer for layer in layers if layer not in sparse)
    dense = () if arch.every_layer else read.values.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
        raise ConfigError(f"{read.file}: mlp_only_layers must be a list of layers, got {dense!r}")
    return tuple(dense)


def _read_groups(read: Reader, arch: MoEArch, experts: int, chosen: int) -> tuple[int, int]:
    """How many groups of experts there are, and in how many of them a token chooses."""
    values = read.values
    if arch.groups is None or not values.get("n_group", arch.groups == "top2"):
        return 1, 1
    if arch.groups == "max" and (values.get("topk_method") or "greedy") == "greedy":
        return 1, 1
    groups, top = read.count("n_group"), read.count("topk_group")
    each = experts // groups
    if (
        experts % groups
        or not chosen <= top * each <= experts
        or (groups > 1 and arch.groups == "top2" and each < 2)
    ):
        raise ConfigError(
            f"{read.file}: {chosen} of {experts} experts cannot be chosen within topk_group {top} "
            f"of n_group {groups}"
        )
    return groups, top
