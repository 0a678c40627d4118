"""A component held beside the policy: its directory, and the model that its weights fill."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from rollout.config import HEAD
from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.loader import open_location, resolve_component
from rollout.models.build import build_model
from rollout.models.config.model import ModelConfig
from rollout.models.held_tensors import HeldTensors
from rollout.models.layers.base import Build
from rollout.models.model import Model
from rollout.models.prediction_head import PredictionHead, head_fault
from rollout.models.registry import Registry
from rollout.weights import TensorMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldComponent:
    """``config`` of an architecture that is known here, which is cut over the ranks as it would be
    if it ran; else None, and ``tensors`` are held whole as the files have them, which may have
    others, too: ``prefixes``. ``head_of``: of a release, if they are the head that it comes with.
    """

    directory: Path
    config: ModelConfig | None
    tensors: tuple[TensorMeta, ...]
    prefixes: Mapping[str, str] = field(default_factory=dict)
    head_of: ModelConfig | None = None

    @classmethod
    def at(cls, name: str, path: str | Path, tp: TensorParallel, expert_parallel: bool) -> Self:
        """From a checkpoint directory (without a ``config.json``, if it has none) or a hub id.

        Of a model that is known here the one called ``mtp`` is the head that it comes with.
        """
        directory = resolve_component(str(path))
        if _is_known(directory / "config.json"):
            config = ModelConfig.from_directory(directory)
            if name == HEAD:
                return cls._head(directory, config)
            config.check_tensor_parallel(tp.size, expert_parallel and config.moe is not None)
            return cls(directory=directory, config=config, tensors=())
        return cls(directory=directory, config=None, tensors=_tensors(directory))

    @classmethod
    def _head(cls, directory: Path, config: ModelConfig) -> Self:
        """What a release has of layers that predict further tokens; its other tensors are passed
        over.
        """
        own, found = config.further_prefixes, _tensors(directory)
        held = tuple(meta for meta in found if meta.name.startswith(own)) if own else ()
        if not held:
            raise ConfigError(
                f"component {HEAD!r}: {directory} has no tensors of layers that predict further "
                f"tokens ({', '.join(own) or f'{config.architecture} has no such layers'}); "
                "give the component another name to hold all of it"
            )
        prefixes = {prefix: prefix for prefix in own}
        for meta in found:
            prefixes.setdefault(f"{meta.name.split('.', 1)[0]}.", "")
        return cls(
            directory=directory, config=None, tensors=held, prefixes=prefixes, head_of=config
        )

    def longest(self, name: str, wanted: int) -> int:
        """Of ``wanted`` tokens of a sequence those that it can draft for, as component ``name``;
        ``ConfigError`` where it cannot run as a draft model.
        """
        config = self.head_of or self.config
        fault = ""
        if self.head_of is not None:
            fault = head_fault(self.head_of, self.tensors)
        elif config is None:
            fault = "it is no whole model of an architecture that rollout runs itself"
        elif config.hf_values is not None or config.labels or config.vision is not None:
            fault = f"{config.architecture} is no language model that rollout runs itself"
        elif config.recurrent_layers:
            fault = "it has recurrent states, which cannot go back behind a draft that was wrong"
        if config is None or fault:
            raise ConfigError(
                f"draft_component={name!r} ({self.directory}): {fault}; name another, or leave it "
                "out to draft by prompt lookup"
            )
        return wanted if self.head_of else min(wanted, config.max_position_embeddings)

    def build(self, beside: Build, longest: int | None = None) -> Model:
        """Empty, of the dtype and on the device of the policy that was built as ``beside`` says.

        ``longest``: tokens of a sequence that it is run for; None: it is not run.
        """
        if self.head_of is not None and longest is not None:
            return self._running_head(self.head_of, beside, longest)
        if self.config is None:
            return HeldTensors(beside, self.tensors, self.prefixes)
        return build_model(
            self.config,
            beside.tp,
            beside.dtype,
            beside.device,
            beside.layout,
            max_model_len=longest or 1,
            expert_parallel=beside.expert_parallel and self.config.moe is not None,
        )

    def _running_head(self, config: ModelConfig, beside: Build, longest: int) -> Model:
        policy, fault = beside.config, ""
        if _family(config) != _family(policy):
            fault = f"is of {config.architecture}, and the model is {policy.architecture}"
        for size in ("hidden_size", "vocab_size", "num_layers"):
            own, wanted = getattr(config, size), getattr(policy, size)
            if own != wanted:
                fault = fault or f"is of a model whose {size} is {own}, and the model's is {wanted}"
        if fault:
            raise ConfigError(
                f"the prediction head in {self.directory} {fault}: name the head of the model's "
                "own release"
            )
        # Positions are the policy's, which may be overridden.
        most = policy.max_position_embeddings
        config = replace(config, layers=policy.layers, max_position_embeddings=most)
        return PredictionHead(replace(beside, config=config), longest, self.tensors, self.prefixes)


def _family(config: ModelConfig) -> str:
    """What is one model, with images or without."""
    return config.architecture.partition("For")[0]


def _tensors(directory: Path) -> tuple[TensorMeta, ...]:
    with open_location(str(directory)) as checkpoint:
        return tuple(checkpoint.metadata())


def _is_known(file: Path) -> bool:
    """Whether a ``config.json`` is there and names an architecture that is declared here."""
    if not file.is_file():
        return False
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        names = values.get("architectures") or []
        return Registry().knows([str(name) for name in names])
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
