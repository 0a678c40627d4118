"""The groups of frameworks' trainers that the ranks are in, by their names."""

from __future__ import annotations

import uuid
from contextlib import suppress

from rollout.engine.executors import gather_replies
from rollout.engine.updates.coordinator import Coordinator
from rollout.engine.updates.vllm_update import GRACE
from rollout.errors import ConfigError, InvalidRequest, RolloutError, VersionConflict
from rollout.weight_sync.transports.vllm_group import START_LIMIT, ForeignGroup


class ForeignGroups:
    """Each is led by one sender: slime's has one for each pipeline stage of its trainer.

    One without a name (vLLM's) is alone: it takes the place of all others, and is left for them.
    """

    def __init__(self, of: Coordinator) -> None:
        self._of = of
        self._joined: dict[str, tuple[ForeignGroup, str]] = {}  # and what the ranks call it

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._joined)

    def join(self, group: ForeignGroup, timeout: float) -> None:
        """Take every rank's place in ``group``, in the place of an earlier one of its name.

        Where the ranks are in it already, and its trainer lives, they stay as they are.
        """
        last = group.rank_offset + self._of.served.num_ranks
        if last > group.size:
            raise ConfigError(
                f"world_size {group.size} is too small: with rank_offset {group.rank_offset} "
                f"this engine's {self._of.served.num_ranks} ranks need places up to {last - 1}; "
                "get_world_size tells how many ranks there are, the trainer comes on top"
            )
        if self._is_in(group, timeout):
            return
        for name in self.names:
            if name == group.name or "" in (name, group.name):
                self.leave(name)
        self._of.turn.take(None, timeout)  # other updates' bytes do not wait behind this
        place = uuid.uuid4().hex
        self._joined[group.name] = group, place
        try:
            args = {"id": place, "group": group.to_wire(), "timeout": timeout}
            limit = timeout + START_LIMIT + GRACE
            gather_replies(self._of.engine.call("stage_join", args), "rendezvous", limit)
        except BaseException:
            self.leave(group.name)
            raise
        finally:
            self._of.turn.end(None)

    def use(self, name: str | None) -> None:
        """The next broadcasts come over this one; None: over the only one."""
        _, place = self._joined[self.names[0] if name is None else name]
        self._of.engine.call("stage_use", {"id": place})

    def check_any(self, ended: str) -> None:
        """``InvalidRequest`` where the ranks are in none; ``ended``: why, if they have left one."""
        if not self._joined:
            raise InvalidRequest(
                "init_weight_transfer_engine (or init_weights_update_group) first: the engine is "
                f"in no transfer group ({ended})"
            )

    def check(self, name: str | None, ended: str) -> None:
        """As ``check_any``; ``VersionConflict`` where they are not in this one."""
        self.check_any(ended)
        there = ", ".join(map(repr, self.names))
        if name is None and len(self._joined) > 1:
            raise VersionConflict(f"the engine is in the groups {there}: say which")
        if name is not None and name not in self._joined:
            raise VersionConflict(f"the engine is in the group {there}, not in {name!r}")

    def leave(self, name: str | None = None) -> bool:
        """Leave it, or all of them; whether there was any."""
        left = self.names if name is None else (name,)
        for one in left:
            _, place = self._joined.pop(one)
            with suppress(RolloutError):  # dead ranks are in no group
                self._of.engine.call("leave_group", {"id": place})
        return bool(left)

    def _is_in(self, group: ForeignGroup, timeout: float) -> bool:
        """Whether every rank is in the group, and the trainer that leads it still there."""
        there, place = self._joined.get(group.name, (None, ""))
        if there != group:
            return False
        with suppress(RolloutError):
            asked = self._of.engine.call("stage_member", {"id": place})
            return all(r["alive"] for r, _ in gather_replies(asked, "rendezvous", timeout))
        return False
