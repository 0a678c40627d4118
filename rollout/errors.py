"""Every error this package raises on purpose.

    RolloutError
      ConfigError(ValueError)            a setting or a checkpoint is unusable; nothing was started
      RequestError
        InvalidRequest(ValueError)       one request is malformed
        PromptTooLong                    it does not fit max_model_len
        RequestAborted                   its call was cancelled on its way
        EngineOverloaded                 too much waits already; retry later
      WeightError                        an update did not happen; the old version serves on
        WeightMismatch                   names, shapes or dtypes differ from the model's
        IncompleteUpdate                 the stream ended before every tensor arrived
        VersionConflict                  stale, repeated, or built on another base
        ChecksumMismatch                 what arrived is not what was sent
        TransferFailed                   the link or a peer failed
        UpdateInProgress                 another update holds the lease
        SourceFailed                     the trainer's own iterator raised (see __cause__)
        LimitExceeded                    it would break its max_stall or max_extra_memory
      EngineError
        WorkerDied                       a rank's process ended
        EngineBroken                     live weights are not one version; a full update mends it
        EngineClosed                     shut down, or asleep
        EngineRestarted                  another epoch than the one this client has seen
        DeadlineExceeded                 a wait ended at its deadline

An error crosses a process as ``to_wire``'s plain dict and comes back as the same class.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class RolloutError(Exception):
    """Root of every error raised on purpose."""


class ConfigError(RolloutError, ValueError):
    """A setting or a checkpoint is unusable; the message names it and the remedy."""


class RequestError(RolloutError):
    """One request failed; the engine and all other requests go on."""


class InvalidRequest(RequestError, ValueError):  # noqa: N818
    """A request is malformed or contradicts itself."""


class PromptTooLong(RequestError, ValueError):  # noqa: N818
    """The prompt leaves no room below ``max_model_len`` or can never fit the KV cache."""


class RequestAborted(RequestError):  # noqa: N818
    """A call was cancelled on its way. An aborted sample raises nothing, see ``finish_reason``."""


class EngineOverloaded(RequestError):  # noqa: N818
    """The engine cannot take the request now; retry later."""


class WeightError(RolloutError):
    """An update failed as a whole; the old version serves on, bit for bit."""


class WeightMismatch(WeightError):  # noqa: N818
    """Names, shapes or dtypes differ from what the model declares; the text names the first few.

    ``problems``: a line each of all where it was raised; a copy that crossed a process has the text
    alone.
    """

    def __init__(self, message: str = "", *, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


class IncompleteUpdate(WeightError):  # noqa: N818
    """The update was sealed before every tensor had arrived."""


class VersionConflict(WeightError):  # noqa: N818
    """The version is stale or repeated, or the update was built on another base."""


class ChecksumMismatch(WeightError):  # noqa: N818
    """The digest of what a rank holds is not the digest of what was sent."""


class TransferFailed(WeightError):  # noqa: N818
    """The link to a peer, or the peer itself, failed during an update."""


class UpdateInProgress(WeightError):  # noqa: N818
    """Another update holds the lease and did not end within the timeout."""


class SourceFailed(WeightError):  # noqa: N818
    """The trainer's own iterator raised; ``__cause__`` is that exception where it was raised."""


class LimitExceeded(WeightError):  # noqa: N818
    """The update would break its ``max_stall`` or ``max_extra_memory``; nothing was staged."""


class EngineError(RolloutError):
    """The engine itself failed."""


class WorkerDied(EngineError):  # noqa: N818
    """The process of a tensor-parallel rank ended unexpectedly."""


class EngineBroken(EngineError):  # noqa: N818
    """The live weights are not one version; only a full update is accepted until one commits."""


class EngineClosed(EngineError):  # noqa: N818
    """The engine was shut down, is asleep, or cannot be reached."""


class EngineRestarted(EngineError):  # noqa: N818
    """The engine has another epoch than this client has seen; send a full update."""


class DeadlineExceeded(EngineError, TimeoutError):  # noqa: N818
    """A wait reached its deadline; the message names the rank, the tensor and the phase."""


# error -> (gRPC status code name, HTTP status). A test walks the tree and fails on a missing row.
STATUS: Mapping[type[RolloutError], tuple[str, int]] = {
    RolloutError: ("INTERNAL", 500),
    ConfigError: ("INVALID_ARGUMENT", 400),
    RequestError: ("INVALID_ARGUMENT", 400),
    InvalidRequest: ("INVALID_ARGUMENT", 400),
    PromptTooLong: ("INVALID_ARGUMENT", 400),
    RequestAborted: ("CANCELLED", 499),
    EngineOverloaded: ("RESOURCE_EXHAUSTED", 429),
    WeightError: ("FAILED_PRECONDITION", 409),
    WeightMismatch: ("FAILED_PRECONDITION", 422),
    IncompleteUpdate: ("FAILED_PRECONDITION", 422),
    VersionConflict: ("ABORTED", 409),
    ChecksumMismatch: ("DATA_LOSS", 422),
    TransferFailed: ("UNAVAILABLE", 502),
    UpdateInProgress: ("ABORTED", 409),
    SourceFailed: ("FAILED_PRECONDITION", 422),
    LimitExceeded: ("FAILED_PRECONDITION", 409),
    EngineError: ("INTERNAL", 500),
    WorkerDied: ("INTERNAL", 503),
    EngineBroken: ("FAILED_PRECONDITION", 503),
    EngineClosed: ("UNAVAILABLE", 503),
    EngineRestarted: ("FAILED_PRECONDITION", 409),
    DeadlineExceeded: ("DEADLINE_EXCEEDED", 504),
}


def some(names: Sequence[str], most: int = 8, between: str = ", ") -> str:
    """The first of ``names``, as many as a message may hold, and how many more there are."""
    text, left = between.join(names[:most]), len(names) - most
    return f"{text}{between.strip(', ')} and {left} more" if left > 0 else text


def shortened(reason: str, most: int = 1024) -> str:
    """What a peer gave as its reason, as long as what keeps the last ones' may hold."""
    return reason if len(reason) <= most else f"{reason[: most - 3]}..."


def of_each(problems: Sequence[str]) -> list[str]:
    """Problems that begin with a tensor's name; a long text that several have is said of the first,
    and the others are named behind it.
    """
    found: dict[str, list[str]] = {}
    for problem in problems:
        name, _, text = problem.partition(" ")
        found.setdefault(text if len(text) > _LONG else problem, []).append(name)
    said = []
    for text, (first, *others) in found.items():
        whole = text if text.startswith(f"{first} ") else f"{first} {text}"
        said.append(whole + (f" (the same of {some(others)})" if others else ""))
    return said


SHUT_DOWN = "this Rollout was shut down; make a new one"  # an ``EngineClosed``
NOT_COPIED = (  # a ``TypeError``, which is what pickling raises
    "a rollout is of its process, and is neither pickled nor copied: pass its address on, and make "
    "another there with connect(address)"
)
FORKED = (  # an ``EngineClosed``
    "this process was forked from the one that made this Rollout, which goes on there; connect to "
    "its address (Rollout.connect) from a process that was spawned: gRPC does not survive a fork"
)
_LONG = 40  # characters of a text that is not said twice
_BY_NAME = {cls.__name__: cls for cls in STATUS}


def to_wire(error: BaseException) -> dict[str, Any]:
    """Plain form of an error; one from outside the tree becomes an ``EngineError`` naming it."""
    if isinstance(error, RolloutError):
        return {"type": type(error).__name__, "message": str(error)}
    return {"type": "EngineError", "message": f"{type(error).__name__}: {error}"}


def from_wire(wire: Mapping[str, Any]) -> RolloutError:
    """The error that ``to_wire`` described; an unknown type becomes a plain ``EngineError``."""
    cls = _BY_NAME.get(str(wire.get("type")), EngineError)
    return cls(str(wire.get("message", "")))
