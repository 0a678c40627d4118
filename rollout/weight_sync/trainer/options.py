"""The keywords of one update."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.config import DEFAULT_BUCKET_BYTES, DEFAULT_TIMEOUT, timeout_problem
from rollout.errors import ConfigError
from rollout.weight_sync.protocol.label import check_label
from rollout.weight_sync.protocol.messages import (
    IN_FLIGHT,
    MAX_BUCKET_BYTES,
    MIN_BUCKET_BYTES,
    PIN_FALLBACKS,
    STAGING,
)
from rollout.weight_sync.protocol.version_number import MAX_VERSION
from rollout.weight_sync.transports.base import Transport
from rollout.wire.codec import MAX_INT

ENCODINGS = ("auto", "full", "delta", "delta-zstd")
_CHOICES = {
    "encoding": ENCODINGS,
    "staging": STAGING,
    "in_flight": IN_FLIGHT,
    "pin_fallback": PIN_FALLBACKS,
}
_READ_THERE = (
    *("version", "staging", "in_flight", "bucket_bytes", "timeout", "label", "partial"),
    *("update_id", "pin_timeout", "pin_fallback"),
)
_SAME_ON_RANKS = ("version", "in_flight", "partial", "staging", "encoding")
_ATTEMPT = len(uuid.uuid4().hex)
_LIMITS = ("max_stall", "max_extra_memory")  # told where they are given

_KINDS: dict[str, tuple[type, ...]] = {
    "version": (int, type(None)),
    "bucket_bytes": (int,),
    "timeout": (float, int),
    "label": (str, type(None)),
    "partial": (bool,),
    "update_id": (str, type(None)),
    "max_stall": (float, int),
    "max_extra_memory": (int,),
    "pin_timeout": (float, int, type(None)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """The keywords of ``Rollout.update_weights``; sizes in bytes, times in seconds.

    ``encoding``: "delta" sends what changed since this sender's last commit wherever that is
    shorter, and keeps a copy of what it sent in host memory for it, each rank of its own part where
    the source is distributed; the whole goes by itself when the engine holds something else, and
    as every ``anchor_every``-th update (0: never for this reason). "delta-zstd" compresses the
    changes, too; both sides need zstd. "auto" sends changes to engines on other hosts, while few
    elements change and memory is plenty. "full" keeps nothing. ``update_id``: of an update that the
    server reads itself, by which a repeated one is known. ``max_stall``: seconds in which no step
    may run; ``max_extra_memory``: bytes that a rank may take on its device beyond what it holds.
    ``pin_timeout``: how long requests may stay with the version before, at most ``timeout`` (None:
    as long), then ``pin_fallback``. Of a copy of another engine: ``adapters_after``, all adapters
    that are to be there then, by version, and ``merged`` as ``WeightInfo`` has it. Of what a
    front takes for a trainer: the update's id (``sent_as``), and for how long the source may keep
    it waiting (``patience``; None: ``timeout``).
    """

    version: int | None = None
    transport: str | Transport = "auto"
    encoding: str = "auto"
    staging: str = "auto"
    in_flight: str = "keep"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    timeout: float = DEFAULT_TIMEOUT
    label: str | None = None
    partial: bool = False
    anchor_every: int = 0
    update_id: str | None = None
    max_stall: float | None = None
    max_extra_memory: int | None = None
    pin_timeout: float | None = None
    pin_fallback: str = "keep"
    adapters_after: Mapping[str, int] | None = None
    merged: tuple[str, ...] = ()
    sent_as: str = ""
    patience: float | None = None

    def new_id(self) -> str:
        """Of another attempt at it, by whose beginning ``is_named`` knows it."""
        attempt = uuid.uuid4().hex
        return f"{self.update_id}:{attempt}" if self.update_id else attempt

    def is_named(self, made: str) -> bool:
        """Whether the update ``made`` was one with this ``update_id``."""
        name, _, attempt = made.rpartition(":")
        return bool(self.update_id) and name == self.update_id and len(attempt) == _ATTEMPT

    def same_on_ranks(self) -> dict[str, Any]:
        """What ranks that send one version together agree on, JSON-able; a rank may say less."""
        usual = UpdateOptions()
        given = {name: getattr(self, name) for name in _SAME_ON_RANKS}
        return {name: v for name, v in given.items() if v != getattr(usual, name)}

    def to_server(self) -> dict[str, Any]:
        """The keywords of an update that the server reads itself, JSON-able."""
        if self.transport != "auto" or self.encoding not in ("auto", "full"):
            raise ConfigError(
                "a server_path is read by the server itself, in full: leave transport and "
                "encoding at 'auto'"
            )
        names = [*_READ_THERE, *(name for name in _LIMITS if getattr(self, name) is not None)]
        usual = {"pin_timeout": None, "pin_fallback": "keep"}  # which old servers do not know
        names = [name for name in names if usual.get(name, ...) != getattr(self, name)]
        return {name: getattr(self, name) for name in names}

    @classmethod
    def on_server(cls, said: Any) -> UpdateOptions:
        """From what ``to_server`` gave; ``ConfigError`` for anything else."""
        kinds = {name: _KINDS.get(name, (str,)) for name in (*_READ_THERE, *_LIMITS)}
        if not isinstance(said, dict) or not set(said) <= set(kinds):
            raise ConfigError(f"an update from a directory takes {', '.join(kinds)}")
        for name, value in said.items():
            if type(value) not in kinds[name]:
                raise ConfigError(f"{name} must be {kinds[name][0].__name__}, got {value!r:.80}")
        return cls(**said)

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            chosen = getattr(self, name)
            if not isinstance(chosen, str) or chosen not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {chosen!r:.80}")
        if not isinstance(self.transport, str | Transport):
            raise ConfigError(
                f"transport must be a name, such as 'auto', or a Transport, got "
                f"{self.transport!r:.80}"
            )
        whole = type(self.bucket_bytes) is int
        if not (whole and MIN_BUCKET_BYTES <= self.bucket_bytes <= MAX_BUCKET_BYTES):
            raise ConfigError(
                f"bucket_bytes must be {MIN_BUCKET_BYTES} to {MAX_BUCKET_BYTES}, got "
                f"{self.bucket_bytes!r:.80}"
            )
        for name in ("label", "update_id"):
            if not isinstance(text := getattr(self, name), str | None):
                raise ConfigError(f"{name} must be a text, got {text!r:.80}")
        if self.label is not None:
            check_label(self.label)
        if not isinstance(self.partial, bool):
            raise ConfigError(f"partial must be True or False, got {self.partial!r:.80}")
        if self.version is not None and (type(self.version) is not int or self.version < 0):
            raise ConfigError(f"version must be an integer of at least 0, got {self.version!r:.80}")
        if self.version is not None and self.version > MAX_VERSION:
            raise ConfigError(f"version must be at most {MAX_VERSION}, got {self.version!r:.80}")
        if problem := timeout_problem(self.timeout):
            raise ConfigError(f"timeout {problem}")
        self._check_pin()
        if type(self.anchor_every) is not int or self.anchor_every < 0:
            raise ConfigError(
                f"anchor_every must be an integer, 0 or more, got {self.anchor_every!r:.80}"
            )
        if self.max_stall is not None and (problem := timeout_problem(self.max_stall)):
            raise ConfigError(f"max_stall {problem}")
        memory = self.max_extra_memory
        if memory is not None and (type(memory) is not int or not 0 <= memory <= MAX_INT):
            raise ConfigError(f"max_extra_memory must be a number of bytes, got {memory!r:.80}")

    def _check_pin(self) -> None:
        if self.pin_timeout is None:
            return
        if problem := timeout_problem(self.pin_timeout):
            raise ConfigError(f"pin_timeout {problem}")
        if self.pin_timeout > self.timeout:
            raise ConfigError(
                f"pin_timeout must be at most the update's timeout ({self.timeout:g} s), got "
                f"{self.pin_timeout:g}: the next update may have to wait so long"
            )
