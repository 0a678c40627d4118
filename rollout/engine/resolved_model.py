"""Which model an engine serves: the directory of its config, and what that says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from rollout.config import EngineConfig
from rollout.engine.tokenizer import Tokenizer
from rollout.errors import ConfigError
from rollout.loader import (
    find_loader,
    is_remote,
    resolve_component,
    resolve_model,
    resolve_tokenizer,
)
from rollout.loader.sharded_state import is_sharded
from rollout.models.config.model import ModelConfig
from rollout.models.module_map import ModuleMap
from rollout.models.registry import Registry
from rollout.models.transformers_backend.remote_code import RemoteCode
from rollout.weights.quantization import MXFP4
from rollout.wire.frames import dtype_from_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """``directory`` has all but, of a URL, the weights; those are at ``location``."""

    directory: Path
    location: str
    config: ModelConfig
    registry: Registry

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Fetched if it has to be; raises ``ConfigError``, before anything is built."""
        find_loader(config.load_format)
        own = ModuleMap() if config.module_map is None else ModuleMap.read(config.module_map)
        registry = own.registry()
        directory = resolve_model(
            config.model, config.revision, config.load_format, code=config.trust_remote_code
        )
        code = None
        if config.trust_remote_code:
            code = RemoteCode(directory=str(directory), revision=config.code_revision)
        model = ModelConfig.from_directory(
            directory, registry, overrides=config.hf_overrides, code=code
        )
        _check_task(config.task, model)
        mapped = model.architecture in own.models  # a map may be of several models
        return cls(
            directory=directory,
            location=config.model if is_remote(config.model) else str(directory),
            config=replace(model, modules={} if mapped else own.modules),
            registry=registry,
        )

    def dtype_of(self, config: EngineConfig) -> torch.dtype:
        """What the model computes in: the one asked for, else the checkpoint's."""
        return self.config.dtype if config.dtype == "auto" else dtype_from_name(config.dtype)

    def load_tokenizer(self, config: EngineConfig) -> Tokenizer | None:
        """The one asked for, else the model's; fetched if it has to be. Raises ``ConfigError``."""
        if config.skip_tokenizer_init:
            return None
        code, revision = config.trust_remote_code, config.tokenizer_revision
        directory = self.directory
        if config.tokenizer is not None or revision is not None:
            directory = resolve_tokenizer(config.tokenizer or config.model, revision, code=code)
        found = Tokenizer.load(
            str(directory),
            chat_template=config.chat_template,
            slow=config.tokenizer_mode == "slow",
            trust_remote_code=code,
            code_revision=config.code_revision,
        )
        if found is not None and config.draft_component is not None:
            directory = self.component(config, config.draft_component)
            _check_draft(config, config.draft_component, directory, found)
        return found

    def component(self, config: EngineConfig, name: str) -> Path:
        """The directory of one that is held beside the model, or is of the same files."""
        path = config.components[name]
        if is_remote(path):
            raise ConfigError(
                f"component {name!r}: {path} is a URL, and components are read from directories "
                "and hubs alone; copy it to a directory"
            )
        if path != config.model:
            return resolve_component(path)
        saved = self.directory / name  # by ``save_sharded_state``
        return saved if is_sharded(saved) else self.directory

    def settled(self, config: EngineConfig) -> EngineConfig:
        """``config`` with the scheme that quantization "auto" stands for here: the files' own, or
        none where nothing here can hold it.
        """
        if config.quantization != "auto":
            return config
        own = self.config.quantization if _holds_quantized(config, self.config) else "none"
        return replace(config, quantization=own)


def _check_draft(config: EngineConfig, name: str, directory: Path, own: Tokenizer) -> None:
    """``ConfigError`` where a draft model has a tokenizer of other tokens: it would guess wrong,
    always, and nobody would know why.
    """
    other = Tokenizer.load(str(directory), trust_remote_code=config.trust_remote_code)
    if other is not None and not own.shares_ids(other):
        raise ConfigError(
            f"draft_component={name!r} ({directory}): its tokenizer has other tokens than the "
            "model's, so that nothing it drafts could be right; name a model of the same family"
        )


def _holds_quantized(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether weights of this model can be held in fewer bits, under these settings."""
    if model.hf_values is not None or config.deterministic:
        return False
    if model.quantization != MXFP4.name or model.moe is None or config.expert_parallel:
        return True
    return model.moe.expert_size // config.tensor_parallel_size % MXFP4.columns == 0


def _check_task(task: str, model: ModelConfig) -> None:
    """``ConfigError`` where the model has another head than the task needs."""
    name, labels = model.architecture, len(model.labels)
    if task == "generate" and labels:
        raise ConfigError(
            f"task='generate' needs a language model, and {name} has a score head: serve a "
            "checkpoint whose architecture ends in ForCausalLM, or set task='classify'"
        )
    if task in ("classify", "reward") and not labels:
        raise ConfigError(
            f"task={task!r} needs a score head, and {name} has none that is served: serve a "
            "checkpoint whose architecture ends in ForSequenceClassification"
        )
    if task == "reward" and labels != 1:
        raise ConfigError(
            f"task='reward' needs a score head of one label, and {name} has {labels}: set "
            "task='classify', or save the checkpoint with num_labels=1"
        )
