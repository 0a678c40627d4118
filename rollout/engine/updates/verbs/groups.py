"""The groups of frameworks' trainers that an engine or a front is in, by their names."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass

from rollout.engine.updates.verbs.update import Places
from rollout.errors import ConfigError, InvalidRequest, TransferFailed, VersionConflict
from rollout.weight_sync.transports.foreign_group import ForeignGroup


@dataclass(slots=True)
class _Joining:
    """A group that is being joined, and why that was given up."""

    group: ForeignGroup
    place: str
    given_up: str = ""


class ForeignGroups:
    """Each is led by one sender: slime's has one for each pipeline stage of its trainer.

    One without a name (vLLM's) is alone: it takes the place of all others, and is left for them.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._joined: dict[str, tuple[ForeignGroup, str]] = {}  # and the id of the places in it
        self._joining: _Joining | None = None
        self._lock = threading.Lock()  # of what is being joined

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._joined)

    def join(self, group: ForeignGroup, timeout: float) -> None:
        """Take every place in ``group``, in the place of an earlier one of its name.

        Where they are taken already, and its trainer lives, they stay as they are. Raises
        ``TransferFailed`` where ``give_up`` ended it.
        """
        count = self._places.count
        last = group.rank_offset + count
        if last > group.size:
            raise ConfigError(
                f"world_size {group.size} is too small: with rank_offset {group.rank_offset} "
                f"this engine's {count} ranks need places up to {last - 1}; "
                "get_world_size tells how many ranks there are, the trainer comes on top"
            )
        self._joining = joining = _Joining(group, uuid.uuid4().hex)
        try:
            try:
                self._take(joining, timeout)
            finally:
                with self._lock:
                    self._joining = None
                if joining.given_up:
                    raise TransferFailed(
                        f"the init that waited for its trainer at {group.host}:{group.port} was "
                        f"{joining.given_up}"
                    )
        except BaseException:
            self.leave(group.name)
            raise

    def give_up(self, why: str, name: str | None = None) -> bool:
        """From any thread: end a ``join`` that waits, of this group if it is named; whether one
        does. Who comes to its places only now has to be told once more.
        """
        with self._lock:
            joining = self._joining
            if joining is None or name not in (None, joining.group.name):
                return False
            joining.given_up = why
        self._places.leave(joining.place)
        return True

    def use(self, name: str | None) -> None:
        """The next broadcasts come over this one; None: over the only one."""
        _, place = self._joined[self.names[0] if name is None else name]
        self._places.use(place)

    def check_any(self, ended: str) -> None:
        """``InvalidRequest`` where it is in none; ``ended``: why, if it has left one."""
        if not self._joined:
            raise InvalidRequest(
                "init_weight_transfer_engine (or init_weights_update_group) first: the engine is "
                f"in no transfer group ({ended})"
            )

    def check(self, name: str | None, ended: str) -> None:
        """As ``check_any``; ``VersionConflict`` where it is not in this one."""
        self.check_any(ended)
        there = ", ".join(map(repr, self.names))
        if name is None and len(self._joined) > 1:
            raise VersionConflict(f"the engine is in the groups {there}: say which")
        if name is not None and name not in self._joined:
            raise VersionConflict(f"the engine is in the group {there}, not in {name!r}")

    def are_alive(self, timeout: float) -> bool:
        """Whether the trainers of all of them are still there."""
        return all(self._places.are_alive(place, timeout) for _, place in self._joined.values())

    def leave(self, name: str | None = None) -> bool:
        """Leave it, or all of them; whether there was any."""
        left = self.names if name is None else (name,)
        for one in left:
            found = self._joined.pop(one, None)
            if found is not None:  # another verb has left it meanwhile
                self._places.leave(found[1])
        return bool(left)

    def _take(self, joining: _Joining, timeout: float) -> None:
        group = joining.group
        there, place = self._joined.get(group.name, (None, ""))
        if there == group and self._places.are_alive(place, timeout):
            return
        for name in self.names:
            if name == group.name or "" in (name, group.name):
                self.leave(name)
        self._joined[group.name] = group, joining.place
        if not joining.given_up:
            self._places.join(joining.place, group, timeout)
