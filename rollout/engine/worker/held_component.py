"""A component held beside the policy: its directory, and the model that its weights fill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from rollout.config import HEAD
from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.loader import open_location
from rollout.models.build import build_model
from rollout.models.causal_lm import CausalLM
from rollout.models.config.model import ModelConfig
from rollout.models.config.reader import read_json
from rollout.models.held_tensors import HeldTensors
from rollout.models.layers.base import Build
from rollout.models.model import Model
from rollout.models.prediction.eagle_head import MAPS, EagleFiles, is_eagle
from rollout.models.prediction.head import HeadBehind, HeadFiles, PredictionHead
from rollout.models.prediction.mtp_head import MTPFiles
from rollout.models.registry import Registry
from rollout.weights import TensorMeta
from rollout.weights.files import weight_files, why_none


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldComponent:
    """``config`` of an architecture that is known here, which is cut over the ranks as it would be
    if it ran; else None, and ``tensors`` are held whole as the files have them, which may have
    others, too: ``prefixes``. ``head``: if they are one that can be run behind the policy;
    ``constants``: what of it is no weight, and is saved with it.
    """

    directory: Path
    config: ModelConfig | None
    tensors: tuple[TensorMeta, ...]
    prefixes: Mapping[str, str] = field(default_factory=dict)
    head: HeadFiles | None = None
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def at(cls, name: str, directory: Path, tp: TensorParallel, expert_parallel: bool) -> Self:
        """From a checkpoint directory (without a ``config.json``, if it has none).

        Of a model that is known here the one called ``mtp`` is the head that it comes with.
        """
        file = directory / "config.json"
        values = read_json(file) if file.is_file() else {}
        known = _is_known(values, file)
        tensors = _tensors(directory) if weight_files(directory) or not known else ()
        is_head = is_eagle(tensors)  # some have the name of the model that they are of
        if known and not is_head:
            config = ModelConfig.from_directory(directory)
            if name == HEAD:
                return cls._head(directory, config, tensors)
            config.check_tensor_parallel(tp.size, expert_parallel and config.moe is not None)
            return cls(directory=directory, config=config, tensors=())
        if not is_head:
            return cls(directory=directory, config=None, tensors=tensors)
        with open_location(str(directory)) as checkpoint:
            maps = {m.name: checkpoint.read(m.name) for m in tensors if m.name in MAPS}
        head = EagleFiles(directory=directory, values=values, tensors=tensors, maps=maps)
        return cls(directory=directory, config=None, tensors=tensors, head=head, constants=maps)

    @classmethod
    def _head(cls, directory: Path, config: ModelConfig, found: tuple[TensorMeta, ...]) -> Self:
        """Of ``found``, what a release has of layers that predict further tokens; its other tensors
        are passed over.
        """
        if not weight_files(directory):
            remedy = (
                f": put them there, or name a directory that has them (components={{{HEAD!r}: "
                f"DIR}}, --component {HEAD}=DIR)"
            )
            raise ConfigError(
                f"component {HEAD!r}: the files of a release say which tensors its head has, also "
                "where load_format='dummy' makes up their values, and "
                f"{directory} has none{why_none(directory) or remedy}"
            )
        own = config.further_prefixes
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
        head = MTPFiles(directory=directory, config=config, tensors=held, prefixes=prefixes)
        return cls(directory=directory, config=None, tensors=held, prefixes=prefixes, head=head)

    def longest(self, name: str, wanted: int) -> int:
        """Of ``wanted`` tokens of a sequence those that it can draft for, as component ``name``;
        ``ConfigError`` where it cannot run as a draft model.
        """
        config, fault, longest = self.config, "", wanted
        if self.head is not None:
            fault = self.head.fault()
        elif config is None:
            fault = "it is no whole model of an architecture that rollout runs itself"
        elif config.hf_values is not None or config.labels or config.vision is not None:
            fault = f"{config.architecture} is no language model that rollout runs itself"
        elif config.recurrent_layers:
            fault = "it has recurrent states, which cannot go back behind a draft that was wrong"
        else:
            longest = min(wanted, config.max_position_embeddings)
        if fault:
            raise ConfigError(
                f"draft_component={name!r} ({self.directory}): {fault}; name another, or leave it "
                "out to draft by prompt lookup"
            )
        return longest

    def build(self, beside: Build, longest: int | None = None) -> Model:
        """Empty, of the dtype and on the device of the policy that was built as ``beside`` says.

        ``longest``: tokens of a sequence that it is run for; None: it is not run.
        """
        if self.head is not None and longest is not None:
            return self.head.build(beside, longest)
        if self.config is None:
            return HeldTensors(beside, self.tensors, self.prefixes, self.constants)
        return build_model(
            self.config,
            beside.tp,
            beside.dtype,
            beside.device,
            beside.layout,
            max_model_len=longest or 1,
            expert_parallel=beside.expert_parallel and self.config.moe is not None,
        )


def head_behind(name: str, held: Model, policy: Model) -> HeadBehind | None:
    """``held``, the component of this name, behind ``policy``, if it is a prediction head;
    ``ConfigError`` where that gives it no states to read.
    """
    if not isinstance(held, PredictionHead):
        return None
    if not isinstance(policy, CausalLM):
        raise ConfigError(
            f"draft_component={name!r}: a prediction head reads hidden states, which a model class "
            "from elsewhere does not give; leave it out"
        )
    if held.reads and policy.build.stage.count > 1:
        raise ConfigError(
            f"draft_component={name!r}: an {held.told} reads what comes before layers "
            f"{', '.join(map(str, held.reads))}, which pipeline_parallel_size="
            f"{policy.build.stage.count} has in several stages: use tensor_parallel_size alone, or "
            "another draft"
        )
    return HeadBehind(held, policy)


def _tensors(directory: Path) -> tuple[TensorMeta, ...]:
    with open_location(str(directory)) as checkpoint:
        return tuple(checkpoint.metadata())


def _is_known(values: Mapping[str, Any], file: Path) -> bool:
    """Whether a ``config.json`` names an architecture that is declared here."""
    names = values.get("architectures") or []
    if not isinstance(names, list):
        raise ConfigError(f"{file}: architectures must be a list, got {names!r:.80}")
    return "draft_vocab_size" not in values and Registry().knows([str(name) for name in names])
