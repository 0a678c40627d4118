"""``rollout serve``: an engine, or several alike, behind HTTP and gRPC until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from rollout.cli.flags import (
    Row,
    add_engine_flags,
    add_model,
    add_rows,
    engine_config,
    model_of,
)
from rollout.cli.fleet import REPLICAS, serving_replicas
from rollout.cli.service import Up, add_listening, check_slots, listening_of, run_service
from rollout.distributed.native_thread import NativeThread
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from rollout.config import EngineConfig
    from rollout.server.service import Addresses, Listening

_FOLLOW_WAIT = 5.0  # seconds for an update that is under way when the service ends
ONE_ENGINE: tuple[Row, ...] = (
    ("--on-death", ("exit", "serve"), "exit",
     "when a rank's process has ended: exit (status 1, after 5 s in which calls get WorkerDied, "
     "so that a supervisor starts another), or serve that error on"),
    ("--follow", "DIR", None,
     "update from the checkpoints and versions that appear in DIR, under a --weight-dir"),
)  # fmt: skip


def add_serve(commands: Any, add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Register the command; ``add_command`` makes a subparser as the others have it."""
    parser = add_command(commands, "serve", serve, "serve a model over HTTP and gRPC")
    add_model(parser)
    add_listening(parser, *ONE_ENGINE)
    add_rows(parser.add_argument_group("several engines"), REPLICAS)
    add_engine_flags(parser)


def serve(args: argparse.Namespace) -> int:
    """See ``run_service``; status 1 when a rank died, unless ``--on-death serve``."""
    config = engine_config(args, model=model_of(args), progress=sys.stderr.isatty())
    at = listening_of(args)
    check_slots(at, config)
    if args.replicas < 1:
        raise ConfigError("--replicas must be 1 or more")
    several = max(args.replicas, args.min_replicas or 1, args.max_replicas or 1) > 1
    if args.follow is not None:
        from rollout.weight_sync.versions.follower import allowed

        allowed(args.follow, config.weight_dirs)
        if several:
            raise ConfigError("--follow goes with one engine: send a fleet its weights instead")
    service = serving_replicas(config, at, args) if several else _engine(args, config, at)
    return asyncio.run(run_service(args, service))


@contextlib.asynccontextmanager
async def _engine(
    args: argparse.Namespace, config: EngineConfig, at: Listening
) -> AsyncIterator[Up]:
    from rollout.server.service import serving

    async with serving(config, at) as found, _following(args.follow, config, found):
        died = found.died if args.on_death == "exit" else None
        yield Up(found.http, found.grpc, found.backend, found.memory, died)


@contextlib.asynccontextmanager
async def _following(directory: str | None, config: Any, at: Addresses) -> AsyncIterator[None]:
    """Updates from ``directory`` come from a thread beside the engine, through no port."""
    if directory is None:
        yield
        return
    from rollout.weight_sync.versions.follower import Follower

    counters = at.counters
    counters.following = directory

    def note(error: str) -> None:
        counters.follow_error = error
        counters.follow_failures += bool(error)

    follower = Follower(
        directory, config.weight_dirs, lambda: at.link, timeout=config.timeout, on_state=note
    )
    ended = threading.Event()
    thread = NativeThread("follow", lambda: follower.run(ended), ended.set)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        at.link.close()  # an update under way ends now, and changes nothing
        await asyncio.to_thread(thread.join, _FOLLOW_WAIT)
