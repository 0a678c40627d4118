"""Which adapters lie on the ranks' devices, where there are more of them than places there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

# A slot, its place from now on (-1: in host memory), and whether its content is yet to come.
Move = tuple[int, int, bool]


class AdapterPlaces:
    """The slots that lie on the devices, in ``count`` places; the others wait in host memory.

    What was used least recently makes room, but never what ``held()`` tells of: slots that running
    sequences use, that are loaded into, or read. Moves are told to the ranks, which copy, before
    the next step (``tell``). For the engine's thread. (S-LoRA, arXiv 2311.03285, section 5.)
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
        known = slot in self._at
        place = self._take(slot)
        if place is not None and not known:
            self._moves.append((slot, place, False))
            self.brought += 1
        return place

    def begin(self, slots: Iterable[int]) -> None:
        """Slots are about to be loaded: those that find no place in host memory."""
        for slot in slots:
            place = self._take(slot)
            self._moves.append((slot, -1 if place is None else place, True))
        self.tell()

    def tell(self) -> None:
        """Have the ranks move what is to be moved; what fails is brought again when it is named."""
        moves, self._moves = self._moves, []
        if not moves:
            return
        try:
            self._tell(moves)
        except BaseException:
            for slot, place, _ in moves:
                if self._at.get(slot) == place:
                    del self._at[slot]
                    self._free.append(place)
            raise

    def _take(self, slot: int) -> int | None:
        place = self._at.pop(slot, None)
        if place is None and self._free:
            place = self._free.pop()
        if place is None:
            held = {slot, *self._held()}
            oldest = next((each for each in self._at if each not in held), None)
            if oldest is None:
                return None
            place = self._at.pop(oldest)
        self._at[slot] = place
        return place
