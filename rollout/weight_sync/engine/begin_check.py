"""What the request of an update may say: judged in one place, before anybody waits for the lease.

Types were checked where the request was read (``update_wire``). What depends on the live version is
``Coordinator.check``'s, which holds the lease by then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rollout.config import MAX_TIMEOUT
from rollout.errors import ConfigError
from rollout.weight_sync.protocol.fit import check_metadata
from rollout.weight_sync.protocol.messages import (
    IN_FLIGHT,
    MAX_BUCKET_BYTES,
    MIN_BUCKET_BYTES,
    STAGING,
    UpdateRequest,
)
from rollout.weight_sync.transports.shared_memory import shared_problem
from rollout.weights import TensorMeta

MAX_VERSION = 1 << 53  # exact in every JSON reader, and never reached by counting
MAX_SENDERS = 1 << 16
MAX_GRACE = 60.0  # seconds
MAX_ID = 256  # characters
_GROUPS = ("broadcast", "p2p")  # roads that need a place to meet
_BACKENDS = ("tcp", "nccl")
_ENCODINGS = ("full", "delta")


def check_request(
    request: UpdateRequest,
    *,
    transports: Sequence[str],
    num_ranks: int,
    device: str,
    wanted: Mapping[str, TensorMeta],
    aliases: Mapping[str, str],
) -> None:
    """Raise what is wrong with any field: ``ConfigError``, or ``WeightMismatch`` for metadata.

    ``transports``: the roads that may be asked for here. ``wanted``: the engine's tensors.
    """
    _one_of("encoding", request.encoding, _ENCODINGS)
    _one_of("staging", request.staging, STAGING)
    _one_of("in_flight", request.in_flight, IN_FLIGHT)
    _one_of("transport", request.transport, transports)
    _within("bucket_bytes", request.bucket_bytes, MIN_BUCKET_BYTES, MAX_BUCKET_BYTES)
    _within("senders", request.senders, 1, MAX_SENDERS)
    _seconds("grace", request.grace, 0.0, MAX_GRACE)
    _seconds("timeout", request.timeout, 0.0, MAX_TIMEOUT)
    if not request.timeout:
        raise ConfigError("timeout must be a positive number of seconds, got 0")
    if not 0 < len(request.update_id) <= MAX_ID:
        raise ConfigError(f"update_id must have 1 to {MAX_ID} characters")
    if request.version is not None and request.version > MAX_VERSION:
        raise ConfigError(f"version must be at most {MAX_VERSION}, got {request.version}")
    if request.encoding == "delta" and (request.base is None or request.staging == "none"):
        raise ConfigError("a delta needs a base, and a shadow to be staged in")
    _check_road(request, num_ranks, device)
    if request.metadata is not None:
        check_metadata(request.metadata, wanted, aliases, partial=request.partial)


def _check_road(request: UpdateRequest, num_ranks: int, device: str) -> None:
    """What a road needs to meet the sender is there, and is such that it can be used here."""
    where, shared, road = request.rendezvous, request.shared, request.transport
    if road in _GROUPS and where is None:
        raise ConfigError(f"transport {road!r} lacks the rendezvous of its group")
    if where is not None:
        _one_of("backend", where.backend, _BACKENDS)
        if where.backend == "nccl" and device.split(":")[0] != "cuda":
            raise ConfigError(f"the backend nccl needs a GPU, and the engine is on {device}")
        places = request.senders + num_ranks
        if where.size != places:
            raise ConfigError(
                f"the sender's group has {where.size} places, but {request.senders} sending and "
                f"this engine's {num_ranks} ranks need {places}: ask weight_info for the engine's "
                "size"
            )
    if road == "ipc" and shared is None:
        raise ConfigError("transport 'ipc' lacks its shared memory")
    if shared is not None and shared.handle and device.split(":")[0] != "cuda":
        raise ConfigError(f"the shared memory is a GPU's, and the engine is on {device}")
    problem = shared and not shared.handle and shared_problem(shared, request.bucket_bytes)
    if shared is not None and problem:
        raise ConfigError(f"the shared memory {shared.name!r:.100} is refused: {problem}")


def _one_of(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{what} must be one of {', '.join(known)}, got {value!r:.80}")


def _within(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{what} must be {low} to {high}, got {value}")


def _seconds(what: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{what} must be {low:g} to {high:g} seconds, got {value}")
