"""Methods of a user's own on every rank: ``worker_extension_cls``, and ``collective_rpc``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rollout.engine.worker.model_runner import ModelRunner
from rollout.errors import ConfigError, EngineError, InvalidRequest, RolloutError
from rollout.models.user_module import imported

_SETTING = "worker_extension_cls"


class WorkerExtension:
    """What a user's class has beside its own methods; each rank makes one, by ``bind``.

    Its methods without a leading underscore are what ``collective_rpc`` runs: on the rank's main
    thread between two steps, without gradients, in the same order on all ranks. Until they return
    nothing is generated.
    """

    def bind(self, device: torch.device, runner: ModelRunner) -> None:
        """Called once, when the model is loaded."""
        self._bound = device, runner

    @property
    def rank(self) -> int:
        return self._bound[1].rank

    @property
    def world_size(self) -> int:
        return self._bound[1].world_size

    @property
    def device(self) -> torch.device:
        return self._bound[0]

    @property
    def model(self) -> nn.Module:
        """What is live now, this rank's part: look it up in each call, and only read. An update
        may bring another instance, and what else is written to this one no digest vouches for.
        Where another stage of a pipeline has a module, this one has parameters of no elements.
        """
        return self._bound[1].instances.live.owner


def make_extension(where: str) -> WorkerExtension:
    """Of ``FILE.py:Class``, ``module:Class`` or ``module.Class``; ``ConfigError`` if it is none."""
    file, colon, name = where.rpartition(":")
    if not colon and not where.endswith(".py"):
        file, _, name = where.rpartition(".")
    if not file or not name.isidentifier():
        raise ConfigError(f"{_SETTING} is FILE.py:Class or module:Class, got {where!r}")
    kind = getattr(imported(file, _SETTING), name, None)
    if not isinstance(kind, type):
        raise ConfigError(f"{_SETTING} {where}: {file} has no class {name}")
    if not issubclass(kind, WorkerExtension):
        if taken := sorted({n for n in dir(WorkerExtension) if n[0] != "_"} & set(dir(kind))):
            raise ConfigError(
                f"{_SETTING} {where} has {', '.join(taken)} of its own, which each rank gives it: "
                "choose other names"
            )
        kind = type(name, (kind, WorkerExtension), {"__module__": kind.__module__})
    try:
        made: WorkerExtension = kind()
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            f"{_SETTING} {where}: {name}() raised {type(error).__name__}: {error}"
        ) from error
    return made


def call_extension(
    extension: WorkerExtension | None,
    method: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """What its method returns, as JSON brings it; ``InvalidRequest`` where there is none.

    What the method raises is an ``EngineError`` that names the rank, unless it is one of ours.
    """
    if extension is None:
        raise InvalidRequest(
            f"collective_rpc: method {method!r} is not there; name a class that has it by "
            f"{_SETTING} when the engine starts"
        )
    theirs, ours = type(extension), dir(WorkerExtension)
    known = [
        n for n in dir(theirs) if n[0] != "_" and n not in ours and callable(getattr(theirs, n))
    ]
    if method not in known:
        has = ", ".join(known) or "none"
        raise InvalidRequest(f"collective_rpc: no method {method!r} of {_SETTING}; it has {has}")
    where = f"{method} of {_SETTING} on rank {extension.rank}"
    try:
        with torch.no_grad():
            found = getattr(extension, method)(*args, **kwargs)
    except RolloutError:
        raise
    except (Exception, SystemExit) as error:  # which would end the thread that runs the steps
        raise EngineError(f"{where} raised {type(error).__name__}: {error}") from error
    try:
        return json.loads(json.dumps(found, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise EngineError(f"{where} returned what JSON does not hold: {error}") from error
