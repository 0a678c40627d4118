"""``rollout top``: what a running service does, in a terminal, drawn anew every second."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout.cli.client import add_client_flags, connect
from rollout.cli.flags import Row, add_rows
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from rollout.generation.metrics import EngineStats
    from rollout.weight_sync.protocol.messages import WeightInfo
    from rollout.weight_sync.protocol.receipts import UpdateReceipt
    from rollout.wire.version import ServerInfo

PIPE_WIDTH = 160  # characters, where the output is no terminal
BAR = 24  # characters of the longest update
PARTS = {  # of an update, and the colour of each
    "gather": "blue", "transfer": "cyan", "stage": "magenta", "verify": "yellow", "stall": "red",
}  # fmt: skip
STATES = {"running": "green", "paused": "yellow", "asleep": "yellow"}  # others are red
TOP: tuple[Row, ...] = (
    ("--once", "", False, "one frame, as it is when the output is no terminal"),
    ("--interval", "X", 1.0, "seconds between two looks"),
    ("--receipts", "N", 8, "show those of the last N commits"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a service said of itself at ``time``, in seconds by the caller's clock."""

    time: float
    server: ServerInfo
    stats: EngineStats
    weights: WeightInfo
    receipts: tuple[UpdateReceipt, ...]

    def tokens_per_second(self, before: Look) -> float | None:
        """None where the engine has been started again since."""
        tokens = self.stats.generation_tokens_total - before.stats.generation_tokens_total
        if self.stats.epoch != before.stats.epoch or self.time <= before.time:
            return None
        return tokens / (self.time - before.time)


def add_top(commands: Any, add_command: Any) -> None:
    """Register the command; ``add_command`` makes a subparser as the others have it."""
    parser = add_command(commands, "top", run, "watch a running service")
    parser.add_argument("address", metavar="HOST:PORT", help="gRPC address of the service")
    add_rows(parser, TOP)
    add_client_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Until Ctrl-C, or the service ends; one frame takes two looks, for the rate between them."""
    if not 0.05 <= args.interval <= 3600:
        raise ConfigError(f"--interval must lie between 0.05 and 3600 s, got {args.interval:g}")
    from rich.console import Console
    from rich.live import Live

    wide = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(width=wide, markup=False, highlight=False, emoji=False, file=sys.stdout)
    with connect(args, args.address, timeout=10.0) as engine:
        before = _look(engine, args.receipts)
        time.sleep(args.interval)
        now = _look(engine, args.receipts)
        if args.once or not console.is_terminal:
            console.print(frame(before, now))
            return 0
        with (
            _ctrl_c() as pressed_within,
            Live(frame(before, now), console=console, auto_refresh=False, screen=True) as live,
        ):
            while not pressed_within(args.interval):
                before, now = now, _look(engine, args.receipts)
                live.update(frame(before, now), refresh=True)
            return 0


@contextmanager
def _ctrl_c() -> Iterator[Callable[[float], bool]]:
    """Gives a wait of some seconds that says whether Ctrl-C was pressed; once more interrupts.

    A KeyboardInterrupt can come anywhere, between taking a lock and the ``try`` that returns it,
    too: then the screen is not given back, or the end of the process waits for ever.
    """
    reads, writes = os.pipe()

    def pressed(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        os.write(writes, b"c")

    before = signal.signal(signal.SIGINT, pressed)
    try:
        yield lambda seconds: bool(select.select([reads], [], [], seconds)[0])
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(reads)
        os.close(writes)


def frame(before: Look, now: Look) -> Group:
    """All that is shown: figures, the last updates and their parts, the last errors."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [_head(now), _figures(before, now), Text()]
    parts.append(_updates(now.receipts) if now.receipts else Text("no update yet", "dim"))
    errors = [*now.stats.weight_update_errors, now.stats.follow_error]
    parts += [Text(f"error: {_plain(error)}", "red") for error in errors if error]
    return Group(*parts)


def _look(engine: Any, receipts: int) -> Look:
    kept = engine.receipts()[-receipts:] if receipts > 0 else ()
    return Look(
        server=engine.server_info(), weights=engine.weight_info(), receipts=kept,
        stats=engine.metrics(), time=time.monotonic(),
    )  # fmt: skip


def _head(now: Look) -> Text:
    from rich.text import Text

    weights, state = now.weights, now.stats.state
    where = f"{weights.num_ranks} x {weights.device}"
    dtype = str(weights.dtype).removeprefix("torch.")
    return Text.assemble(
        (_plain(now.server.model), "bold"), "  ", (state, STATES.get(state, "red")),
        f"  {where}, {dtype}  update {weights.state}",
    )  # fmt: skip


def _figures(before: Look, now: Look) -> Table:
    from rich.table import Table
    from rich.text import Text

    stats, rate = now.stats, now.tokens_per_second(before)
    label = f" {_plain(now.weights.label)}" if now.weights.label else ""
    figures: Mapping[str, str] = {
        "version": f"{now.weights.version}{label}",
        "tokens/s": "-" if rate is None else f"{rate:.1f}",
        "running": str(stats.running),
        "queue": str(stats.waiting),
        "KV use": f"{stats.kv_usage:.1%}",
        "last stall": _seconds(stats.last_stall_seconds) if stats.weight_updates_total else "-",
        "updates": str(stats.weight_updates_total),
        "failed": str(stats.weight_updates_failed_total),
    }
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name in figures:
        table.add_column(name)
    table.add_row(*(Text(value, "bold") for value in figures.values()))
    return table


def _updates(receipts: tuple[UpdateReceipt, ...]) -> Table:
    """Newest first. A bar is as long as the update took, coloured by its parts' shares of them."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("update", "by", "timeline"):
        table.add_column(name, no_wrap=True)
    for name in (*PARTS, "total"):
        table.add_column(Text(name, PARTS.get(name, "")), justify="right", no_wrap=True)
    table.add_column("digest", no_wrap=True)
    longest = max(receipt.timings.get("total", 0.0) for receipt in receipts)
    for receipt in reversed(receipts):
        times = receipt.timings
        label = f" {_plain(receipt.label)}" if receipt.label else ""
        table.add_row(
            Text(f"v{receipt.version}{label}"), Text(_plain(receipt.transport)),
            _bar(times, longest),
            *(Text(_seconds(times.get(name))) for name in (*PARTS, "total")),
            Text(f"{receipt.digest:016x}"),
        )  # fmt: skip
    return table


def _bar(times: Mapping[str, float], longest: float) -> Text:
    from rich.text import Text

    total, parts = times.get("total", 0.0), sum(times.get(name, 0.0) for name in PARTS)
    wide = max(1, round(BAR * total / longest)) if longest > 0 else 1
    bar, reached = Text(), 0.0
    for name, colour in PARTS.items():
        reached += times.get(name, 0.0) / parts if parts else 0.0
        bar.append("█" * (round(wide * reached) - len(bar)), colour)
    return bar


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.{0 if value >= 0.01 else 2}f} ms"


def _plain(text: str) -> str:
    """One line without control characters: a name from elsewhere moves no cursor."""
    text = " ".join(text.split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
