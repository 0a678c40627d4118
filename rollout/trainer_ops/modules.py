"""What each module of a dense transformers block computes, by the engine's ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from torch.nn.functional import linear as plain_linear

from rollout.errors import ConfigError, InvalidRequest
from rollout.kernels import rms_norm, segment_sums, silu_mul
from rollout.models.causal_lm import CausalLM
from rollout.models.layers.activations import gelu_tanh
from rollout.models.layers.attention import Attention
from rollout.models.layers.base import Layer
from rollout.models.layers.embedding import VocabParallel
from rollout.models.layers.linear import MergedColumnLinear, ReplicatedLinear, RowLinear
from rollout.models.layers.norm import HeadsNorm, LayerNorm, RMSNorm, RowNorm, standardise
from rollout.trainer_ops.functions import linear, through
from rollout.weights import PLAIN

INSTEAD = "Train it as it is, and correct for the difference by the importance ratio."

Forward = Callable[..., Any]


def forward_of(name: str, module: nn.Module, engine: CausalLM) -> Forward | None:
    """What ``module`` is to compute instead of its own; None where that may stay.

    ``ConfigError`` where it is none whose bits are known.
    """
    kind = type(module).__name__
    if kind.endswith("RotaryEmbedding"):
        turned = max(rotary.dim for rotary in engine.rotaries)
        halves = 2 if engine.config.arch.sinks else 1  # gpt-oss has each angle once
        return partial(_unturned, turned // halves)
    if kind in ("SiLUActivation", "SiLU"):
        return _silu
    if kind == "GELUTanh":
        return _gelu
    if kind.endswith("DecoderLayer") and engine.config.arch.parallel:
        return partial(_parallel, module)
    if isinstance(module, nn.Dropout) and module.p:
        raise ConfigError(f"{name} drops {module.p} of its inputs: set its rate to 0. {INSTEAD}")
    own = dict(module.named_parameters(recurse=False))
    if not own or isinstance(module, nn.Embedding):
        return None
    if own.keys() == {"sinks"} and engine.config.arch.sinks:
        return None  # attention, which hands them to its function
    source = engine.table.aliases.get(f"{name}.weight", f"{name}.weight")
    slots = engine.table.slots.get(source)
    path = slots[0].param.rpartition(".")[0] if slots else ""
    found = _of_layer(module, engine.get_submodule(path), path, engine) if path else None
    if found is None:
        raise ConfigError(
            f"{name}, a {kind}, is no module that runs the engine's ops: merge adapters, and leave "
            f"out quantisation. {INSTEAD}"
        )
    return found


def _of_layer(module: nn.Module, layer: nn.Module, path: str, engine: CausalLM) -> Forward | None:
    """For a module whose weight ``layer``, the submodule ``path``, has in the engine."""
    if isinstance(layer, RMSNorm):
        return partial(_norm, module, layer)
    if isinstance(layer, LayerNorm | HeadsNorm):
        return partial(_layer_norm, module, layer)
    if isinstance(layer, RowNorm):
        attention = engine.get_submodule(path.rpartition(".")[0])
        assert isinstance(attention, Attention)
        return partial(_row_norm, module, layer, attention)
    if type(module).forward is nn.Linear.forward:
        if isinstance(layer, VocabParallel):
            return partial(_head, module, layer)
        if isinstance(layer, RowLinear) and not layer.reduce:
            return partial(_lanes, module, layer)
        if isinstance(layer, MergedColumnLinear | ReplicatedLinear | RowLinear):
            return partial(apply_linear, module, layer)
    return None


def _unturned(
    dims: int, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """cos 1 and sin 0: q and k pass transformers' rotation as they are, for ``Sequences`` turns
    them by the engine's op, whose products and sums are fused."""
    return x.new_ones(1, 1, dims), x.new_zeros(1, 1, dims)


def _silu(x: Tensor) -> Tensor:
    """The op's own gate, times ones: torch's computes what fills no vector in another way."""

    def gated(x: Tensor) -> Tensor:
        return silu_mul(torch.cat((x, torch.ones_like(x)), dim=-1))

    return through(gated, silu, x)


def _gelu(x: Tensor) -> Tensor:
    return through(gelu_tanh, partial(gelu, approximate="tanh"), x)


def _norm(module: Any, layer: RMSNorm, x: Tensor) -> Tensor:
    def by(op: Forward) -> Forward:
        return lambda x, weight: op(x, weight, layer.eps, layer.offset)

    return through(by(rms_norm), by(rms_norm.reference), x, module.weight)


def _layer_norm(module: Any, layer: LayerNorm | HeadsNorm, x: Tensor) -> Tensor:
    return standardise(x, module.weight, layer.eps, getattr(module, "bias", None))


def _row_norm(module: Any, layer: RowNorm, attention: Attention, x: Tensor) -> Tensor:
    """q or k [..., all their elements]: squares are summed head by head, as ranks do."""
    heads = x.reshape(-1, layer.total // attention.head_dim, attention.head_dim)
    squares = attention.squares(heads, heads.shape[1])
    return layer.part(heads.flatten(1), squares, module.weight).view_as(x)


def apply_linear(module: Any, layer: Layer, x: Tensor) -> Tensor:
    """A linear by the layer of the engine that has its weight."""
    wanted = layer.build.dtype
    if not x.dtype == module.weight.dtype == wanted:
        raise InvalidRequest(
            f"a linear has {x.dtype} to multiply by {module.weight.dtype}, and the model was "
            f"patched for {wanted}: patch it for the dtype that both are in"
        )
    segments = layer.segments if isinstance(layer, RowLinear) else 1
    bias = getattr(module, "bias", None)
    return linear(x, module.weight, bias, layer.specs["weight"].layout, segments)


def _lanes(module: Any, layer: RowLinear, x: Tensor) -> Tensor:
    """Of a shared expert: float32 [lanes, T, outputs], which are added to those of the others."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return segment_sums(x, weight, layer.segments)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        parts = zip(x.chunk(layer.segments, -1), weight.chunk(layer.segments, -1), strict=True)
        return torch.stack([plain_linear(a, b).float() for a, b in parts])

    return through(run, plain, x, module.weight)


def _head(module: Any, layer: VocabParallel, x: Tensor) -> Tensor:
    dtype = layer.build.head_dtype
    if dtype in (None, layer.build.dtype):
        return apply_linear(module, layer, x)
    return linear(x.to(dtype), module.weight.to(dtype), None, PLAIN)


def _parallel(module: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Both halves of a block read its one norm; they are added to each other first."""
    x = module.input_layernorm(hidden_states)
    attended, _ = module.self_attn(hidden_states=x, **kwargs)
    total: Tensor = hidden_states + (attended + module.mlp(x))
    return total
