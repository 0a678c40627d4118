"""A generation engine whose weights are a transaction: ``Rollout``, ``AsyncRollout`` and nouns.

Names are resolved when first used (PEP 562), so a trainer that imports ``rollout.weight_sync``
loads neither the engine nor transformers nor a server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "AsyncRollout": "api",
    "AsyncSession": "api",
    "ChatOptions": "generation",
    "ChecksumMismatch": "errors",
    "ClassificationOutput": "generation",
    "ColocatedRollout": "api",
    "Completion": "generation",
    "ConfigError": "errors",
    "DeadlineExceeded": "errors",
    "EmbeddingOutput": "generation",
    "EngineBroken": "errors",
    "EngineClosed": "errors",
    "EngineConfig": "config",
    "EngineError": "errors",
    "EngineOverloaded": "errors",
    "EngineRestarted": "errors",
    "IncompleteUpdate": "errors",
    "InvalidRequest": "errors",
    "LimitExceeded": "errors",
    "Logprobs": "generation",
    "PromptTooLong": "errors",
    "RequestAborted": "errors",
    "RequestError": "errors",
    "RequestOutput": "generation",
    "Rollout": "api",
    "RolloutError": "errors",
    "SamplingMask": "generation",
    "SamplingParams": "generation",
    "ScoreOutput": "generation",
    "Session": "api",
    "SourceFailed": "errors",
    "Trajectory": "api",
    "TransferFailed": "errors",
    "UpdateInProgress": "errors",
    "UpdateReceipt": "weight_sync.protocol.receipts",
    "VersionConflict": "errors",
    "VersionSpan": "generation",
    "WeightError": "errors",
    "WeightInfo": "weight_sync.protocol.messages",
    "WeightMismatch": "errors",
    "WeightSource": "weight_sync.trainer.sources.base",
    "WorkerDied": "errors",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from rollout.api import AsyncRollout as AsyncRollout
    from rollout.api import AsyncSession as AsyncSession
    from rollout.api import ColocatedRollout as ColocatedRollout
    from rollout.api import Rollout as Rollout
    from rollout.api import Session as Session
    from rollout.api import Trajectory as Trajectory
    from rollout.config import EngineConfig as EngineConfig
    from rollout.errors import ChecksumMismatch as ChecksumMismatch
    from rollout.errors import ConfigError as ConfigError
    from rollout.errors import DeadlineExceeded as DeadlineExceeded
    from rollout.errors import EngineBroken as EngineBroken
    from rollout.errors import EngineClosed as EngineClosed
    from rollout.errors import EngineError as EngineError
    from rollout.errors import EngineOverloaded as EngineOverloaded
    from rollout.errors import EngineRestarted as EngineRestarted
    from rollout.errors import IncompleteUpdate as IncompleteUpdate
    from rollout.errors import InvalidRequest as InvalidRequest
    from rollout.errors import LimitExceeded as LimitExceeded
    from rollout.errors import PromptTooLong as PromptTooLong
    from rollout.errors import RequestAborted as RequestAborted
    from rollout.errors import RequestError as RequestError
    from rollout.errors import RolloutError as RolloutError
    from rollout.errors import SourceFailed as SourceFailed
    from rollout.errors import TransferFailed as TransferFailed
    from rollout.errors import UpdateInProgress as UpdateInProgress
    from rollout.errors import VersionConflict as VersionConflict
    from rollout.errors import WeightError as WeightError
    from rollout.errors import WeightMismatch as WeightMismatch
    from rollout.errors import WorkerDied as WorkerDied
    from rollout.generation import ChatOptions as ChatOptions
    from rollout.generation import ClassificationOutput as ClassificationOutput
    from rollout.generation import Completion as Completion
    from rollout.generation import EmbeddingOutput as EmbeddingOutput
    from rollout.generation import Logprobs as Logprobs
    from rollout.generation import RequestOutput as RequestOutput
    from rollout.generation import SamplingMask as SamplingMask
    from rollout.generation import SamplingParams as SamplingParams
    from rollout.generation import ScoreOutput as ScoreOutput
    from rollout.generation import VersionSpan as VersionSpan
    from rollout.weight_sync.protocol.messages import WeightInfo as WeightInfo
    from rollout.weight_sync.protocol.receipts import UpdateReceipt as UpdateReceipt
    from rollout.weight_sync.trainer.sources.base import WeightSource as WeightSource


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rollout' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rollout.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
