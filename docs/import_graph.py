"""Print who imports whom at the top of the package: the figures in architecture.md.

    python docs/import_graph.py            # needs import-linter (the `dev` extra)

A part is a file or folder at the top of the package, an arrow says that one imports another, a
level is how deep a part stands on others. Imports within functions and for types count, too.
"""

from __future__ import annotations

from functools import cache

import grimp

GRAPH = grimp.build_graph("rollout", cache_dir=None)
PARTS = sorted(GRAPH.find_children("rollout"))


@cache
def below(part: str) -> frozenset[str]:
    """The parts that ``part`` imports."""
    inside = {part, *GRAPH.find_descendants(part)}
    imported = {other for name in inside for other in GRAPH.find_modules_directly_imported_by(name)}
    parts = {".".join(name.split(".")[:2]) for name in imported}
    return frozenset(parts - {part, "rollout"})


def level(part: str, above: tuple[str, ...] = ()) -> int:
    under = [level(other, (*above, part)) for other in below(part) if other not in above]
    return 1 + max(under, default=-1)


def main() -> None:
    levels = {part: level(part) for part in PARTS}
    for height in sorted(set(levels.values()), reverse=True):
        for part in (part for part in PARTS if levels[part] == height):
            names = " ".join(sorted(other.removeprefix("rollout.") for other in below(part)))
            print(f"{height}  {part.removeprefix('rollout.'):13} -> {names or 'nothing'}")
    arrows = sum(len(below(part)) for part in PARTS)
    print(f"{len(PARTS)} parts, {max(levels.values()) + 1} levels, {arrows} arrows")


if __name__ == "__main__":
    main()
