"""Which adapters lie on the ranks' devices, where there are more of them than places there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

Move = tuple[int, int]  # a slot, and the place that gets what it holds


class AdapterPlaces:
    """The slots that lie on the devices, in ``count`` places; host memory has all of them.

    What was used least recently makes room, but never what ``held()`` tells of: slots that running
    sequences use. Moves are told to the ranks, which copy, before the next step (``tell``). For the
    engine's thread. (S-LoRA, arXiv 2311.03285, section 5.)
    """

    def __init__(
        self, count: int, held: Callable[[], Collection[int]], tell: Callable[[list[Move]], None]
    ) -> None:
        self._held, self._tell = held, tell
        self._at: dict[int, int] = {}  # by slot, the one used least recently first
        self._free = list(range(count))
        self._moves: list[Move] = []
        self.brought = 0  # from host memory, so far

    def bring(self, slot: int) -> int | None:
        """Where ``slot`` lies in the next step; None: the others are held."""
        place = self._at.pop(slot, None)
        if place is None:
            place = self._make_room()
            if place is None:
                return None
            self._moves.append((slot, place))
            self.brought += 1
        self._at[slot] = place
        return place

    def forget(self, slots: Iterable[int]) -> None:
        """These are about to be loaded anew: what they held is of no use."""
        for slot in slots:
            place = self._at.pop(slot, None)
            if place is not None:
                self._free.append(place)

    def tell(self) -> None:
        """Have the ranks move what is to be moved; what fails is brought again when it is named."""
        moves, self._moves = self._moves, []
        if not moves:
            return
        try:
            self._tell(moves)
        except BaseException:
            self.forget(slot for slot, place in moves if self._at.get(slot) == place)
            raise

    def _make_room(self) -> int | None:
        if self._free:
            return self._free.pop()
        held = self._held()
        oldest = next((each for each in self._at if each not in held), None)
        return None if oldest is None else self._at.pop(oldest)
