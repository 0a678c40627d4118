"""Members that are lost, and those that one call was lost with."""

from __future__ import annotations

from rollout.errors import EngineBroken, EngineClosed, EngineRestarted, WorkerDied
from rollout.fleet.directory import Directory

LOST = (
    EngineBroken,
    EngineClosed,
    EngineRestarted,
    WorkerDied,
)  # it is the member's end, not that of what it was asked


class Lost:
    """Each is passed over until it is seen out of service, or in a new life: until then a front
    may hold for alive what is gone, and one that was only cut off may still run the request.
    """

    def __init__(self, fleet: Directory) -> None:
        self._fleet = fleet
        self._lives: dict[str, int | None] = {}
        self._losses: set[tuple[str, int | None]] = set()

    def add(self, name: str, life: int | None) -> None:
        """``life``: in which the call was sent to it, as ``Directory.life``."""
        self._lives[name] = life
        self._losses.add((name, life))

    @property
    def count(self) -> int:
        """Of lives: one that is lost twice is no sign that prompts end processes."""
        return len(self._losses)

    def names(self) -> set[str]:
        """Those to pass over now."""
        serving = {link.name for link in self._fleet.serving()}
        life = self._fleet.life
        self._lives = {
            name: old for name, old in self._lives.items() if name in serving and life(name) == old
        }
        return set(self._lives)
