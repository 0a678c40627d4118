"""``rollout replay``: a request of a journal, run again."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.cli.flags import Row, add_rows
from rollout.cli.tables import print_table
from rollout.errors import ConfigError

REPLAY: tuple[Row, ...] = (
    ("--journal", "DIR", None, "the journal that `rollout serve --journal DIR` wrote"),
    ("--checkpoint", "DIR", None,
     "run on these weights (default: the model that the engine was started with)"),
    ("--adapter", "DIR", None,
     "of a request that had one: its directory, as PEFT's save_pretrained wrote it"),
    ("--device", ("auto", "cpu", "cuda"), None, "run here (default: the recorded device)"),
    ("--list", "N", 20, "without an ID: the newest N requests"),
)  # fmt: skip


def add_replay(commands: Any, add_command: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands, "replay", run, "run a request of a journal again and compare the tokens"
    )
    parser.add_argument("request_id", nargs="?", metavar="ID", help="the request's id")
    add_rows(parser, REPLAY)


def run(args: argparse.Namespace) -> int:
    """Status 0 where the same tokens came, 1 where others did."""
    if args.journal is None:
        raise ConfigError("replay needs the journal: --journal DIR, as `rollout serve` had it")
    directory = Path(args.journal).expanduser()
    if args.list < 1:
        raise ConfigError("--list must be 1 or more")
    if args.request_id is None:
        return _list(directory, args.list)
    from rollout.api.diagnosing.replay import replay

    given = {} if args.device is None else {"device": args.device}
    given |= {} if args.adapter is None else {"adapter": args.adapter}
    report = replay(directory, args.request_id, checkpoint=args.checkpoint, **given)
    for line in report.lines():
        print(line)
    return 0 if report.same else 1


def _list(directory: Path, count: int) -> int:
    from collections import deque

    from rollout.engine.requests.journal import read_journal

    newest = deque(read_journal(directory), maxlen=count)
    rows = [
        (
            one.request_id,
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one.finished)),
            len(one.prompt_token_ids),
            "+".join(str(len(sample.token_ids)) for sample in one.samples),
            ",".join(map(str, one.digests)),
        )
        for one in newest
    ]
    print_table(rows, "id", "finished (UTC)", "prompt", "tokens", "versions")
    return 0
