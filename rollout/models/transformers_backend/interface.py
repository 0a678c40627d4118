"""Transformers' attention interface: what its modules call by name, and whom we have them call.

Under our name, ``rollout``, the modules of a model hand queries, keys and values to a ``Step``: one
that notes their shapes (``probe.py``), or one that attends over pages
(``transformers_lm.py``).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from rollout.errors import ConfigError

NAME = "rollout"
EAGER = "eager"
KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What one module asks for: [1, heads, T, dim] each; see ``paged_attention`` for the rest."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int
    softcap: float
    sinks: Tensor | None


class Step(Protocol):
    """Attention of one model's modules, in the order in which they call.

    ``positions``: [1, T] of the step; None where the modules count by themselves.
    """

    positions: Tensor | None

    def attend(self, call: AttentionCall) -> Tensor:
        """[1, T, heads, dim of the values]."""
        ...


def bind(model: nn.Module, step: Step) -> None:
    """From now on the attention of ``model`` is what ``step`` makes of it.

    Modules that embed positions, and would count them from what their own cache has, are told
    those of the step, where it has some (``positions``, [1, T]).
    """
    for module in model.modules():
        module.__dict__["rollout_step"] = step
        embeds = "PositionalEmbedding" in type(module).__name__
        if embeds and "position_ids" in inspect.signature(module.forward).parameters:
            if "rollout_placed" not in module.__dict__:
                module.register_forward_pre_hook(_place, with_kwargs=True)
            module.__dict__["rollout_placed"] = True


def _place(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    positions, given = module.__dict__["rollout_step"].positions, kwargs.get("position_ids")
    if positions is None:
        return args, kwargs
    if given is None:
        kwargs = {**kwargs, "position_ids": positions}
    elif given.dim() == 1:  # what the modules have counted: who is told positions has rows of them
        kwargs = {**kwargs, "position_ids": positions[0]}
    return args, kwargs


def register() -> None:
    """Make our interface known to transformers, under its name; again changes nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, _interface)


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What a module of transformers calls; positions and pages are the step's, not its own."""
    if (
        attention_mask is not None
        or rest.get("is_causal", getattr(module, "is_causal", True)) is False
    ):
        raise ConfigError(f"{type(module).__name__}: only causal attention is served")
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if sliding_window is None and types and index is not None and types[index] == KINDS[1]:
        sliding_window = getattr(config, "sliding_window", None)
    step: Step = module.__dict__["rollout_step"]
    out = step.attend(
        AttentionCall(
            query=query,
            key=key,
            value=value,
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=int(sliding_window or 0),
            softcap=float(softcap or 0.0),
            sinks=s_aux,
        )
    )
    return out, None
