"""A component held beside the policy: its directory, and the model that its weights fill."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.loader import resolve_model
from rollout.models.build import build_model
from rollout.models.config import ModelConfig
from rollout.models.held_tensors import HeldTensors
from rollout.models.layers.base import Build
from rollout.models.model import Model
from rollout.models.registry import Registry
from rollout.weights import TensorMeta
from rollout.weights.files import open_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldComponent:
    """``config`` of an architecture that is known here, which is cut over the ranks as it would be
    if it ran; else None, and ``tensors`` are held whole as the files have them.
    """

    directory: Path
    config: ModelConfig | None
    tensors: tuple[TensorMeta, ...]

    @classmethod
    def at(cls, path: str, tp: TensorParallel, expert_parallel: bool) -> Self:
        """From a checkpoint directory (without a ``config.json``, if it has none) or a hub id."""
        directory = Path(path).expanduser()
        if not directory.is_dir():
            directory = resolve_model(path)
        if _is_known(directory / "config.json"):
            config = ModelConfig.from_directory(directory)
            config.check_tensor_parallel(tp.size, expert_parallel and config.moe is not None)
            return cls(directory=directory, config=config, tensors=())
        _, files = open_weights(directory)
        try:
            return cls(directory=directory, config=None, tensors=tuple(files.metadata().values()))
        finally:
            files.close()

    def build(self, beside: Build) -> Model:
        """Empty, of the dtype and on the device of the policy that was built as ``beside`` says."""
        if self.config is None:
            return HeldTensors(beside, self.tensors)
        return build_model(
            self.config,
            beside.tp,
            beside.dtype,
            beside.device,
            beside.layout,
            max_model_len=1,  # it is not run
            expert_parallel=beside.expert_parallel and self.config.moe is not None,
        )


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
