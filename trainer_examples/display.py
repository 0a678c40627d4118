"""What the demo shows: a live table on a terminal, plain lines elsewhere, and a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.live import Live
from rich.table import Table

Row = dict[str, Any]  # an event of trainer_rank.py
COLUMNS = ("step", "reward", "version", "tokens/s", "sync s", "stall ms", "max logprob diff")
SHOWN = 12  # rows of the live table


class Display:
    """``add`` every step; a context manager, for the live table."""

    def __init__(self, steps: int) -> None:
        self.rows: list[Row] = []
        self._steps = steps
        self._live = Live(_table([])) if sys.stdout.isatty() else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self._live:
            self._live.update(_table(self.rows[-SHOWN:]))
        elif row["step"] % 5 == 0 or row["step"] in (1, self._steps):
            cells = zip(COLUMNS, _cells(row), strict=True)
            print("  ".join(f"{name} {value}" for name, value in cells), flush=True)

    def say(self, text: str) -> None:
        if self._live:
            self._live.console.print(text)
        else:
            print(text, flush=True)


def mean_reward(row: Row) -> float:
    return float(row["correct"] / row["samples"])


def draw(rows: list[Row], path: Path, name: str) -> str:
    """Reward over steps, and each update's stall under it, as a PNG; what to say of it."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: it needs matplotlib (pip install -c constraints.txt -e '.[demo]')"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [row["step"] for row in rows]
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    top.plot(steps, [mean_reward(row) for row in rows])
    top.set(ylabel="fraction of correct sums", ylim=(0, 1), title=f"{name}: two-digit addition")
    top.grid(alpha=0.3)
    bottom.bar(steps, [row["stall_seconds"] * 1e3 for row in rows])
    bottom.set(xlabel="step", ylabel="stall of the update, ms")
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"saved the picture {path}"


def _table(rows: list[Row]) -> Table:
    table = Table(title="trainer and rollout")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row["step"]),
        f"{mean_reward(row):.3f}",
        str(row["version"]),
        f"{row['tokens'] / row['sample_seconds']:.0f}",
        f"{row['sync_seconds']:.3f}",
        f"{row['stall_seconds'] * 1e3:.2f}",
        f"{row['difference']:.1e}",
    )
