"""Who holds generation back, and how."""

from __future__ import annotations

from rollout.engine.scheduling.scheduler import Scheduler

PAUSED = "generation is paused until resume_generation() (over HTTP /resume)"


class PauseState:
    """Named holds on a scheduler; it runs freely when none is left. Engine thread only.

    A *freeze* stops every step. A *gate* only keeps requests out that have not begun. Owners
    (pause, drain, hold, sleep) are independent: opening one leaves the others in force. While
    somebody waits behind a gate for what runs to end it is shut, too; whether it stays so is
    decided when the waiting ends.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._freezes: set[str] = set()
        self._gates: set[str] = set()
        self._waits: dict[object, str] = {}
        self._noted: set[str] = set()  # owners of holds that ``note`` has told of

    def is_held_by(self, owner: str) -> bool:
        """From any thread."""
        waits = list(self._waits.values())  # at once: others may change it meanwhile
        return owner in self._freezes or owner in self._gates or owner in waits

    def is_frozen_by(self, owner: str) -> bool:
        """From any thread: whether nothing ends until it is opened."""
        return owner in self._freezes

    def note(self, owner: str) -> bool:
        """Whether ``owner`` holds what comes now; True once in each time that it does."""
        if owner in self._noted or not self.is_held_by(owner):
            return False
        self._noted.add(owner)
        return True

    def freeze(self, owner: str) -> None:
        self._freezes.add(owner)
        self._apply()

    def wait_behind(self, owner: str, waiter: object) -> None:
        """Shut for as long as ``waiter`` waits."""
        self._waits[waiter] = owner
        self._apply()

    def stop_waiting(self, waiter: object, *, stay_shut: bool) -> None:
        """Nothing to do where the owner was opened meanwhile."""
        owner = self._waits.pop(waiter, None)
        if owner is not None and stay_shut:
            self._gates.add(owner)
        self._apply()

    def open(self, owner: str) -> None:
        self._freezes.discard(owner)
        self._gates.discard(owner)
        self._waits = {waiter: by for waiter, by in self._waits.items() if by != owner}
        self._apply()

    def _apply(self) -> None:
        self._scheduler.frozen = bool(self._freezes)
        self._scheduler.admitting = not (self._gates or self._waits)
        self._noted = {owner for owner in self._noted if self.is_held_by(owner)}
