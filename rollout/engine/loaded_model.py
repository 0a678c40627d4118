"""The model that an engine serves, as its ranks have loaded it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollout.engine.tokenizer import Tokenizer
from rollout.generation import Labels
from rollout.models.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """``tokenizer`` None: requests bring token ids. ``ranks``: what each rank replied at start."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    ranks: Sequence[Mapping[str, Any]]

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """End-of-sequence tokens of the config and of the tokenizer."""
        ids = set(self.config.eos_token_ids)
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids.add(self.tokenizer.eos_token_id)
        return frozenset(token for token in ids if token < self.config.vocab_size)

    @cached_property
    def labels(self) -> Labels | None:
        """Of a score head; None for a language model."""
        names, problem = self.config.labels, self.config.problem_type
        return Labels(names=names, problem_type=problem) if names else None

    @property
    def placeholders(self) -> dict[str, int]:
        """The tokens that stand for images and videos in a prompt, by what they stand for."""
        vision = self.config.vision
        if vision is None:
            return {}
        found = {"images": vision.image_token, "videos": vision.video_token}
        return {what: token for what, token in found.items() if token is not None}

    @cached_property
    def sparse_layers(self) -> tuple[bool, ...]:
        """For each layer whether it routes to experts; empty if that is not known."""
        return tuple(self.ranks[0].get("sparse_layers", ()))

    @cached_property
    def experts(self) -> tuple[int, int, int] | None:
        """Number of expert layers, experts per token, experts; None if unknown."""
        moe, layers = self.config.moe, sum(self.sparse_layers)
        return (layers, moe.experts_per_token, moe.num_experts) if moe and layers else None

    @cached_property
    def gives_hidden_states(self) -> bool:
        return all(rank["hidden_states"] for rank in self.ranks)

    @property
    def nonfinite(self) -> list[str]:
        """Tensors of the checkpoint that hold NaN or infinity."""
        return sorted({name for rank in self.ranks for name in rank.get("nonfinite", ())})
