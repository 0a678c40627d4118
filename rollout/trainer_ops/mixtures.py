"""What the modules of a mixture of experts compute, by the engine's ops."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from rollout.errors import ConfigError
from rollout.kernels import finish_sums, fused_experts
from rollout.kernels.batch_invariant_linear import tree_sum
from rollout.models.causal_lm import CausalLM
from rollout.models.decoder.blocks import DecoderBlock
from rollout.models.decoder.moe import SparseMoE, route
from rollout.models.layers.activations import sigmoid
from rollout.models.layers.ordered_experts import ordered_experts
from rollout.models.layers.router import BIAS, Router
from rollout.trainer_ops.functions import linear, through
from rollout.trainer_ops.modules import INSTEAD, Forward, apply_linear
from rollout.weights import PLAIN


def forwards_of(model: Any, engine: CausalLM) -> dict[nn.Module, Forward]:
    """Of the routers and experts of a transformers model, and of blocks with a shared expert."""
    found: dict[nn.Module, Forward] = {}
    for layer, block in zip(model.base_model.layers, engine.model.layers, strict=True):
        assert isinstance(block, DecoderBlock)
        sparse, mlp = getattr(block, block.mlp_name), layer.mlp
        if not isinstance(sparse, SparseMoE):
            continue
        name = sparse.moe.arch.router
        router = sparse.get_submodule(name)
        assert isinstance(router, Router)
        if getattr(mlp, "jitter_noise", 0):
            raise ConfigError(
                f"router_jitter_noise {mlp.jitter_noise}: set it to 0, the rollout has none. "
                f"{INSTEAD}"
            )
        found[getattr(mlp, name)] = partial(_route, getattr(mlp, name), sparse, router)
        found[mlp.experts] = partial(_experts, mlp.experts, sparse, router)
        if sparse.shared is not None:
            found[mlp] = partial(_beside_shared, mlp, sparse)
    return found


def _route(
    module: Any, sparse: SparseMoE, router: Router, x: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights, experts), as transformers' routers return them. ``bias``: on the choice,
    where the block has it and not its router."""
    rows = x.reshape(-1, x.shape[-1])
    if router.arch.wide_router:
        logits = linear(rows.float(), module.weight.float(), None, PLAIN)
    else:
        logits = apply_linear(module, router, rows)
    bias = getattr(module, BIAS, None) if bias is None else bias
    chosen, weights = route(logits, sparse.moe, bias, deterministic=True)
    return logits, weights if sparse.moe.arch.wide_weights else weights.to(x.dtype), chosen


def _experts(
    module: Any,
    sparse: SparseMoE,
    router: Router,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    beside: Tensor | None = None,
) -> Tensor:
    """The sum over each token's experts, x [T, hidden]. ``beside``: lanes that are added first."""
    stacked = sparse.moe.arch.stacked
    turned = stacked is not None and stacked.rows is None  # [experts, inputs, outputs]
    biased = stacked is not None and stacked.bias
    names = ("gate_up_proj_bias", "down_proj_bias") if biased else ()

    def run(x: Tensor, weights: Tensor, *given: Tensor | None) -> Tensor:
        lanes, w13, w2, b13, b2 = _arguments(given, turned)
        build = router.build
        out = ordered_experts(build, x, w13, w2, chosen, weights, 0, (b13, b2))
        out = out if lanes is None else out + lanes
        return finish_sums(tree_sum(list(out.unbind())), None, x.dtype)

    def plain(x: Tensor, weights: Tensor, *given: Tensor | None) -> Tensor:
        lanes, w13, w2, b13, b2 = _arguments(given, turned)
        clamped = sparse.moe.clamped
        out = fused_experts.reference(x, w13, w2, chosen, weights, 0, b13, b2, clamped)
        return out if lanes is None else (out + lanes.sum(0)).to(x.dtype)

    own = (module.gate_up_proj, module.down_proj, *(getattr(module, name) for name in names))
    return through(run, plain, x, weights, beside, *own)


def _arguments(given: tuple[Tensor | None, ...], turned: bool) -> tuple[Any, ...]:
    """Lanes, w13 and w2 as the engine's op takes them, and their biases."""
    lanes, w13, w2, *biases = given
    assert w13 is not None
    assert w2 is not None
    if turned:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    b13, b2 = biases or (None, None)
    return lanes, w13, w2, b13, b2


def _beside_shared(block: Any, sparse: SparseMoE, hidden_states: Tensor) -> Tensor:
    """A block of experts and one that every token passes, whose lanes are added to theirs."""
    assert sparse.shared is not None
    name, rows = sparse.shared.name, hidden_states.flatten(0, -2)
    _, weights, chosen = getattr(block, sparse.moe.arch.router)(rows)
    shared = getattr(block, name)(rows)
    if sparse.shared.gated:
        shared = sigmoid(getattr(block, f"{name}_gate")(rows)) * shared
    out: Tensor = block.experts(rows, chosen, weights, shared)
    return out.view_as(hidden_states)
