"""Tables of the command line: as wide as a terminal, and a line for each row in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence


def print_table(rows: Iterable[Sequence[object]], *columns: str) -> None:
    """``rows`` below the names of ``columns``, the first to the left and the others to the right;
    without names both columns are to the left.
    """
    from rich.console import Console
    from rich.table import Table

    shown = [[str(cell) for cell in row] for row in rows]
    cells = zip(*shown, *([columns] if columns else []), strict=True)  # by column
    wide = None if sys.stdout.isatty() else sum(2 + max(map(len, column)) for column in cells)
    console = Console(width=wide, markup=False, highlight=False, emoji=False, file=sys.stdout)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(columns))
    for name in columns or ("", ""):
        table.add_column(name, justify="right" if name and table.columns else "left")
    for row in shown:
        table.add_row(*row)
    console.print(table)
