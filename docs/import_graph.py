"""Print the package as rooms and arrows: what the figures in architecture.md are made by.

    python docs/import_graph.py            # needs import-linter (the `dev` extra)

A room is a file or folder at the top of the package, an arrow says that one imports another, a
level is how deep a room stands on others. Imports within functions and for types count, too.
"""

from __future__ import annotations

from functools import cache

import grimp

GRAPH = grimp.build_graph("rollout", cache_dir=None)
ROOMS = sorted(GRAPH.find_children("rollout"))


@cache
def below(room: str) -> frozenset[str]:
    """The rooms that ``room`` imports."""
    inside = {room, *GRAPH.find_descendants(room)}
    imported = {other for name in inside for other in GRAPH.find_modules_directly_imported_by(name)}
    rooms = {".".join(name.split(".")[:2]) for name in imported}
    return frozenset(rooms - {room, "rollout"})


def level(room: str, above: tuple[str, ...] = ()) -> int:
    under = [level(other, (*above, room)) for other in below(room) if other not in above]
    return 1 + max(under, default=-1)


def main() -> None:
    levels = {room: level(room) for room in ROOMS}
    for height in sorted(set(levels.values()), reverse=True):
        for room in (room for room in ROOMS if levels[room] == height):
            names = " ".join(sorted(other.removeprefix("rollout.") for other in below(room)))
            print(f"{height}  {room.removeprefix('rollout.'):13} -> {names or 'nothing'}")
    arrows = sum(len(below(room)) for room in ROOMS)
    print(f"{len(ROOMS)} rooms, {max(levels.values()) + 1} levels, {arrows} arrows")


if __name__ == "__main__":
    main()
