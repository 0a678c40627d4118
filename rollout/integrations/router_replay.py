"""The trainer's end of router replay: a mixture's tokens go to the experts that the rollout chose.

Works on the modules of transformers 5 whose routers return (logits, weights, experts), among them
Qwen-MoE, Mixtral, OLMoE, DeepSeek-V3 and GLM-MoE; imports no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.errors import InvalidRequest

ROUTERS = ("gate", "router")  # what a layer of experts calls its router


@dataclass(slots=True)
class Replay:
    """What replay changed in the first forward pass: of ``routed`` choices (a token in a layer) the
    routers themselves would have chosen another set in ``differing``, of ``tokens`` in any layer
    for ``differing_tokens``.
    """

    routed: int = 0
    differing: int = 0
    tokens: int = 0
    _differs: dict[int, Tensor] = field(default_factory=dict)

    @property
    def differing_tokens(self) -> int:
        if not self._differs:
            return 0
        return int(torch.stack(list(self._differs.values())).any(0).sum())

    def add(self, layer: int, own: Tensor, told: Tensor) -> None:
        """Of one layer, [tokens, experts of a token] each; those told are -1 where none was."""
        was_told = told[:, 0] >= 0
        differs = (own.sort(-1).values != told.sort(-1).values).any(-1) & was_told
        if layer not in self._differs:  # else a checkpointed layer, computed again
            self.routed += int(was_told.sum())
            self.differing += int(differs.sum())
            self.tokens = int(was_told.sum())
            self._differs[layer] = differs


def expert_batch(rows: Sequence[NDArray[Any] | Tensor], length: int) -> Tensor:
    """``Completion.routed_experts`` of several sequences as one batch for ``replayed_experts``.

    int16 [sequences, length, layers, experts of a token], for token ids that are padded on the
    right to ``length``; -1, where the router chooses, for padding and each sequence's last token.
    """
    if not rows:
        raise InvalidRequest("routed_experts of no sequence: give one array for each")
    if any(row is None for row in rows):
        raise InvalidRequest(
            "a completion has no experts: ask with SamplingParams(return_routed_experts=True)"
        )
    first = torch.as_tensor(rows[0])
    batch = torch.full((len(rows), length, *first.shape[1:]), -1, dtype=torch.int16)
    for into, given in zip(batch, rows, strict=True):
        one = torch.as_tensor(given)
        if one.shape[1:] != first.shape[1:] or len(one) > length:
            raise InvalidRequest(
                f"routed_experts of shape {list(one.shape)} do not fit a batch of length {length} "
                f"whose first have {list(first.shape)}"
            )
        into[: len(one)] = one
    return batch


@contextmanager
def replayed_experts(model: nn.Module, experts: Tensor | NDArray[Any]) -> Iterator[Replay]:
    """Within it, forward passes of ``model`` send tokens to ``experts``.

    ``experts``: integers [..., tokens, layers with experts, experts of a token] for the token ids
    [..., tokens] of each pass, -1 where the router is to choose. A token's weights over its experts
    are the router's own of those, with their gradients. With gradient checkpointing the backward
    pass belongs within, too. ``InvalidRequest`` where shapes do not fit, an expert does not exist,
    or a router computes its weights in a way that is not known here.
    """
    routers = _routers(model)
    told = torch.as_tensor(experts)
    if told.dim() < 3 or told.is_floating_point() or told.shape[-2] != len(routers):
        raise InvalidRequest(
            f"experts have shape {list(told.shape)}: integers [..., tokens, {len(routers)} layers, "
            "experts of a token] are needed"
        )
    told, replay = told.flatten(0, -3), Replay()
    handles = [
        router.register_forward_hook(_replacing(name, layer, told[:, layer], replay))
        for layer, (name, router) in enumerate(routers.items())
    ]
    try:
        yield replay
    finally:
        for handle in handles:
            handle.remove()


def _routers(model: nn.Module) -> dict[str, nn.Module]:
    """The routers of the layers that have experts, in their order, by name."""
    found = {
        f"{name}.{child}": getattr(module, child)
        for name, module in model.named_modules()
        if hasattr(module, "experts")
        for child in ROUTERS
        if isinstance(getattr(module, child, None), nn.Module)
    }
    if not found:
        raise InvalidRequest(f"{type(model).__name__} has no layers of experts to replay")
    return found


def _replacing(
    name: str, layer: int, told: Tensor, replay: Replay
) -> Callable[[nn.Module, Any, Any], tuple[Tensor, Tensor, Tensor]]:
    weigh: Callable[[Tensor, Tensor], Tensor] | None = None

    def replace(router: nn.Module, args: Any, out: Any) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal weigh
        if not (isinstance(out, tuple) and len(out) == 3):
            raise InvalidRequest(f"{name} does not return (logits, weights, experts): not known")
        logits, weights, own = out
        _check(name, told, own, logits.shape[-1])
        forced = told.to(own)
        weigh = weigh or _rule(name, router, logits.detach(), weights.detach(), own)
        replay.add(layer, own, forced)
        chosen = torch.where(forced < 0, own, forced)
        return logits, weigh(logits, chosen).to(weights.dtype), chosen

    return replace


def _check(name: str, told: Tensor, own: Tensor, count: int) -> None:
    if told.shape != own.shape:
        raise InvalidRequest(
            f"{name} routes {list(own.shape)} (tokens, experts of each), experts were given for "
            f"{list(told.shape)}: make them by expert_batch([...], length=ids.shape[1])"
        )
    if told.numel() and not -1 <= int(told.min()) <= int(told.max()) < count:
        raise InvalidRequest(f"{name}: experts must be in 0..{count - 1}, or -1")


def _rule(
    name: str, router: nn.Module, logits: Tensor, weights: Tensor, own: Tensor
) -> Callable[[Tensor, Tensor], Tensor]:
    """How ``router`` weighs the experts that it chose: found by its own answer."""
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    scores: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda x: x.float().softmax(-1),
        "sigmoid": lambda x: x.float().sigmoid(),
    }
    for score in scores.values():
        for whole in (True, False):

            def weigh(
                logits: Tensor,
                chosen: Tensor,
                score: Callable[[Tensor], Tensor] = score,
                whole: bool = whole,
            ) -> Tensor:
                found = score(logits).gather(-1, chosen)
                if whole:
                    found = found / (found.sum(-1, keepdim=True) + 1e-20)
                return found * scale

            coarse = max(torch.finfo(weights.dtype).eps, torch.finfo(logits.dtype).eps)
            if torch.allclose(weigh(logits, own), weights.float(), rtol=4 * coarse, atol=coarse):
                return weigh
    raise InvalidRequest(
        f"{name} ({type(router).__name__}) weighs experts by neither softmax nor sigmoid of its "
        "logits: it cannot be replayed here"
    )
