"""What the request of an update may say: judged in one place, before anybody waits for the lease.

Types were checked where the request was read (``wire.codec``). What depends on the live version
is ``Coordinator.check``'s, which holds the lease by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollout.config import MAX_TIMEOUT
from rollout.errors import ConfigError
from rollout.weight_sync.protocol.fit import check_metadata
from rollout.weight_sync.protocol.label import check_label
from rollout.weight_sync.protocol.messages import (
    IN_FLIGHT,
    MAX_BUCKET_BYTES,
    MIN_BUCKET_BYTES,
    PIN_FALLBACKS,
    STAGING,
    UpdateRequest,
)
from rollout.weight_sync.protocol.version_number import MAX_VERSION
from rollout.weight_sync.transports import find
from rollout.weight_sync.transports.base import Accepted
from rollout.weights.components import (
    adapter_component,
    adapter_of,
    check_components,
)
from rollout.weights.wanted import WantedWeights

MAX_ID = 256  # characters
_ENCODINGS = ("full", "delta", "live")


def check_request(
    request: UpdateRequest,
    *,
    transports: Sequence[str],
    num_ranks: int,
    device: str,
    wanted: WantedWeights,
) -> Accepted:
    """Raise what is wrong with any field: ``ConfigError``, or ``WeightMismatch`` for metadata.

    ``transports``: those that may be asked for here. Returns what the transport makes of its offer.
    """
    _check_fields(request)
    _one_of("transport", request.transport, transports)
    _check_combinations(request)
    accepted = find(request.transport, device).check(request, num_ranks, device)
    if not request.components and request.adapters_after is None:  # which may unload some
        raise ConfigError("an update brings the weights of one component at least")
    check_components(request.components, wanted.components)
    if request.metadata is not None:
        check_metadata(
            *(request.metadata, wanted), partial=request.partial, components=request.components
        )
    return accepted


def _check_fields(request: UpdateRequest) -> None:
    """Each field by itself."""
    _one_of("encoding", request.encoding, _ENCODINGS)
    _one_of("staging", request.staging, STAGING)
    _one_of("in_flight", request.in_flight, IN_FLIGHT)
    _one_of("pin_fallback", request.pin_fallback, PIN_FALLBACKS)
    _within("bucket_bytes", request.bucket_bytes, MIN_BUCKET_BYTES, MAX_BUCKET_BYTES)
    _seconds("timeout", request.timeout, 0.0, MAX_TIMEOUT)
    if not request.timeout:
        raise ConfigError("timeout must be a positive number of seconds, got 0")
    _seconds("pin_timeout", request.pin_timeout, 0.0, request.timeout)
    if not 0 < len(request.update_id) <= MAX_ID:
        raise ConfigError(f"update_id must have 1 to {MAX_ID} characters")
    if request.label is not None:
        check_label(request.label)
    if request.version is not None and request.version > MAX_VERSION:
        raise ConfigError(f"version must be at most {MAX_VERSION}, got {request.version}")
    if request.max_stall is not None:
        _seconds("max_stall", request.max_stall, 0.0, MAX_TIMEOUT)


def _check_combinations(request: UpdateRequest) -> None:
    """Fields that do not go together."""
    if request.encoding == "live" and (request.partial or request.staging == "none"):
        raise ConfigError("the memory of another engine comes whole, into a shadow")
    if request.encoding == "delta" and (request.base is None or request.staging == "none"):
        raise ConfigError("a delta needs a base, and a shadow to be staged in")
    if {adapter_component(name) for name in request.adapters} != {
        part for part in request.components if adapter_of(part) is not None
    }:
        raise ConfigError("adapters and components of a request name the same adapters")
    _check_adapters_after(request)
    if request.adapters and request.encoding == "delta":
        raise ConfigError("adapters travel whole: send them with encoding full")


def _check_adapters_after(request: UpdateRequest) -> None:
    after = request.adapters_after
    if after is None:
        return
    if max(after.values(), default=0) > MAX_VERSION:
        raise ConfigError(f"version must be at most {MAX_VERSION}, got {max(after.values())}")
    if not request.adapters.keys() <= after.keys():
        raise ConfigError("adapters that are sent are not among those that are to be there")
    if request.adapters and not request.models:
        raise ConfigError("adapters get versions of their own as a copy, with the models, alone")


def _one_of(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{what} must be one of {', '.join(known)}, got {value!r:.80}")


def _within(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{what} must be {low} to {high}, got {value}")


def _seconds(what: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{what} must be {low:g} to {high:g} seconds, got {value}")
