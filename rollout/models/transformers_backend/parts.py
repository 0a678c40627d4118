"""What transformers' modules run as where ranks have parts of them, by the kinds of plans."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError

OUTPUTS, INPUTS = -2, -1  # axes of a weight [..., outputs, inputs]
# Attributes of attention by which it knows its own heads, or how wide they are together.
COUNTS = (
    "num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_heads",
    "all_head_size", "split_size", "embed_dim",
)  # fmt: skip


class Place:
    """This rank, as modules know it; tensors without memory have neighbours without any, too."""

    def __init__(self, tp: TensorParallel) -> None:
        self.rank, self.size, self._tp = tp.rank, tp.size, tp

    def __deepcopy__(self, memo: Any) -> Place:
        return self  # a copy of the modules has the same ranks

    def sum(self, x: Tensor) -> Tensor:
        return x if x.is_meta else self._tp.all_reduce(x.contiguous())

    def gather(self, x: Tensor, columns: int) -> Tensor:
        """The ranks' parts of the last dimension, without what is padding behind ``columns``."""
        if x.is_meta:
            return x.new_empty(*x.shape[:-1], columns)
        return self._tp.all_gather(x)[..., :columns]


class Part(nn.Module):
    """A module of transformers of whose parameters this rank has a part."""

    rollout_place: Place
    rollout_whole: int  # its attribute ``Kind.of``, as before it was cut


class SummedLinear(Part):
    """This rank's inputs: the outputs are sums over ranks, a bias is added behind them."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bias = self._parameters.get("bias")
        if bias is not None:  # a Conv1D cannot do without
            none = None if isinstance(self, nn.Linear) else torch.zeros_like(bias)
            self._parameters["bias"] = none  # type: ignore[assignment]
        try:
            y = self.rollout_place.sum(super().forward(x, *args, **kwargs))
        finally:
            if bias is not None:
                self._parameters["bias"] = bias
        return y if bias is None else y + bias


class SplitLinear(SummedLinear):
    """The same of inputs that every rank has whole."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight: Any = self.weight
        here = weight.shape[INPUTS]
        first = self.rollout_place.rank * here
        return super().forward(x[..., first : first + here], *args, **kwargs)


class Gathered(Part):
    """This rank's outputs, those of all side by side on every rank."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.rollout_place.gather(super().forward(*args, **kwargs), self.rollout_whole)


class OfAll(Part):
    """This rank's inputs are taken side by side with those of all."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        whole = self.rollout_place.gather(x, x.shape[-1] * self.rollout_place.size)
        out: Tensor = super().forward(whole, *args, **kwargs)
        return out


class Biased(Part):
    """Attention by this rank's heads, which is handed biases of all."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for name in ("alibi", "position_bias", "attention_mask"):
            if kwargs.get(name) is not None:
                kwargs[name] = self._own(kwargs[name])
        return super().forward(*args, **kwargs)

    def _own(self, x: Tensor) -> Tensor:
        """Of [sequences x heads, 1, keys] or [sequences, heads, queries, keys]; of one head: all"""
        every, ranks = self.rollout_whole, self.rollout_place.size
        here = every // ranks
        first = self.rollout_place.rank * here
        if x.dim() == 3:
            return x.view(-1, every, *x.shape[1:]).narrow(1, first, here).flatten(0, 1)
        return x.narrow(1, first, here) if x.shape[1] == every else x


class Summed(Part):
    """What ranks make of their parts is added up."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.rollout_place.sum(super().forward(*args, **kwargs))


class Divided(Part):
    """All ranks give the same to a sum over them."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        part: Tensor = super().forward(x / self.rollout_place.size, *args, **kwargs)
        return part


class Vocabulary(Part):
    """Rows of an embedding: ids of other ranks are zeros here."""

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight: Any = self.weight
        local = ids - self.rollout_place.rank * weight.shape[0]
        here = (local >= 0) & (local < weight.shape[0])
        rows: Tensor = super().forward(torch.where(here, local, 0), *args, **kwargs)
        return self.rollout_place.sum(rows.masked_fill(~here[..., None], 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a parameter is cut: along ``axis`` (None: whole on every rank), with its ``biases`` or
    without, each of ``packed`` equal parts by itself, ``padded`` to a multiple of the ranks or not;
    and what its module, which has the attribute ``of``, runs as, with its ``counts`` divided.
    """

    axis: int | None = None
    biases: bool = False
    packed: int = 1
    padded: bool = False
    counts: tuple[str, ...] = ()
    runs: type[Part] | None = None
    of: tuple[str, ...] = ()  # the first of these that there is


WHOLE = Kind()
KINDS: dict[str, Kind] = {
    "colwise": Kind(axis=OUTPUTS, biases=True),
    "colwise_gather_output": Kind(
        axis=OUTPUTS, biases=True, padded=True, runs=Gathered, of=("out_features",)
    ),
    "rowwise": Kind(axis=INPUTS, runs=SummedLinear, of=("in_features",)),
    "rowwise_split_input": Kind(axis=INPUTS, runs=SplitLinear, of=("in_features",)),
    "packed_colwise": Kind(axis=OUTPUTS, biases=True, packed=2),
    "packed_rowwise": Kind(axis=INPUTS, packed=2),
    "embedding_rowwise": Kind(
        axis=0, biases=True, padded=True, runs=Vocabulary, of=("num_embeddings",)
    ),
    "embedding_colwise": Kind(axis=1, runs=Gathered, of=("embedding_dim",)),
    "moe_tp_experts": Kind(runs=Summed),
    "moe_identity_expert": Kind(runs=Divided),
    "all_reduce": Kind(runs=Summed),
    # Whole, and their gradients are none of ours; parameters are tensors of this rank anyway.
    "replicated_with_grad_allreduce": WHOLE,
    "mla_kv_a_proj": WHOLE,
    "replicate": WHOLE,
    "local_params": WHOLE,
    # Of our plans alone.
    "packed_qkv_colwise": Kind(axis=OUTPUTS, biases=True, packed=3),
    "conv1d_colwise": Kind(axis=-1, biases=True, counts=("nf",)),
    "conv1d_packed_colwise": Kind(axis=-1, biases=True, packed=3, counts=("nf",)),
    "conv1d_rowwise": Kind(axis=0, runs=SummedLinear, of=("nx",)),
    "gather_input": Kind(runs=OfAll),
    "heads": Kind(counts=COUNTS),
    "biased_heads": Kind(counts=COUNTS, runs=Biased, of=("num_heads", "n_heads")),
}
KINDS["colwise_rep"] = KINDS["colwise_gather_output"]
KINDS["rowwise_rep"] = KINDS["rowwise_split_input"]


def run_as(name: str, module: nn.Module, kind: Kind, rule: str, place: Place) -> None:
    """Make ``module`` one of its own class that runs as ``kind`` says, in place."""
    found = [getattr(module, own) for own in kind.of if hasattr(module, own)]
    if kind.of and not found:
        raise ConfigError(
            f"{name}: its plan says {rule}, and a {type(module).__name__} has no {kind.of[0]}"
        )
    own: Any = type(module)
    runs: Any = kind.runs
    module.__class__ = _class(own, runs)
    module.__dict__["rollout_place"] = place
    module.__dict__["rollout_whole"] = found[0] if found else 0


@cache
def _class(kind: Any, runs: Any) -> type[nn.Module]:
    return type(kind.__name__, (runs, kind), {"__module__": kind.__module__})
