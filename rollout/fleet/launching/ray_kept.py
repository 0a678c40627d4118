"""Engines on a Ray cluster that outlive a front which is killed; how the next one finds them."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rollout.engine.executors.ray import NAMESPACE
from rollout.errors import ConfigError

FILE = "ray.json"
_LIMIT = 10.0  # seconds for one to answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """``name``: the replica's. ``words``: what it was started with."""

    name: str
    words: Sequence[str]
    actor: Any
    placement: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a fleet's actors and placement groups are named after, and the token of its engines:
    both as long as the directory of its record.
    """

    fleet: str
    token: str

    @classmethod
    def of(cls, record: str | Path) -> Self:
        """Made where there is none. The caller holds the record. Raises ``ConfigError``."""
        path = Path(record) / FILE
        try:
            if not path.exists():
                made = cls(fleet=secrets.token_hex(8), token=secrets.token_hex(16))
                beside = path.with_suffix(".new")
                with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                    json.dump(asdict(made), file)
                    file.flush()
                    os.fsync(file.fileno())
                beside.replace(path)
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{path}, which says whose engines are whose on Ray, cannot be used: {error}"
            ) from error

    def group(self, name: str) -> str:
        """Of a new engine: its actor and placement group have it."""
        return f"{self._prefix}{name}-{secrets.token_hex(4)}"

    def survivors(self, ray: Any) -> list[Survivor]:
        """Those that answer; whatever else there is of this fleet's is ended."""
        named = ray.util.list_named_actors(all_namespaces=True)
        groups = {row["name"] for row in named if row["namespace"] == NAMESPACE}
        found: dict[str, Survivor] = {}
        for group in sorted(name for name in groups if name.startswith(self._prefix)):
            name = group.removeprefix(self._prefix).rpartition("-")[0]
            with suppress(ValueError):  # it has ended meanwhile
                actor = ray.get_actor(group, namespace=NAMESPACE)
                try:
                    words, placement = ray.get(actor.about.remote(), timeout=_LIMIT)
                    found[group] = Survivor(
                        name=name, words=words, actor=actor, placement=placement
                    )
                except ray.exceptions.RayError:
                    ray.kill(actor, no_restart=True)
        for row in ray.util.placement_group_table().values():
            group = row["name"]
            stray = group.startswith(self._prefix) and group not in found
            if stray and row["state"] != "REMOVED":
                with suppress(ValueError):
                    ray.util.remove_placement_group(ray.util.get_placement_group(group))
        return list(found.values())

    @property
    def _prefix(self) -> str:
        return f"rollout-{self.fleet}-"
