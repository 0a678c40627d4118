"""``rollout serve``: an engine, or several alike, behind HTTP and gRPC until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from rollout.cli.flags import (
    Row,
    add_engine_flags,
    add_model,
    add_rows,
    engine_config,
    given_of,
    model_of,
    refuse,
)
from rollout.cli.fleet import REPLICAS, serving_replicas
from rollout.cli.following import check_followed, following
from rollout.cli.service import Up, add_listening, check_slots, listening_of, run_service
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from rollout.config import EngineConfig
    from rollout.server.service import Listening

log = logging.getLogger(__name__)

ONE_ENGINE: tuple[Row, ...] = (
    ("--on-death", ("exit", "serve"), "exit",
     "when a rank's process has ended: exit (status 1, after 5 s in which calls get WorkerDied, "
     "so that a supervisor starts another), or serve that error on"),
)  # fmt: skip
_OF_SEVERAL = tuple(row for row in REPLICAS if row[0] in ("--lease", "--patience"))


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
    if (args.quorum or 1) > args.replicas:
        raise ConfigError(
            f"--quorum {args.quorum} is more than --replicas {args.replicas}: no update could "
            "commit"
        )
    several = max(args.replicas, args.min_replicas or 1, args.max_replicas or 1) > 1
    if several:
        refuse(args, ONE_ENGINE, "of one engine: of --replicas each is started again when it ends")
    elif given := given_of(args, _OF_SEVERAL):  # a script may leave the number open
        log.warning("%s: of several engines (--replicas); this is one", ", ".join(given))
    check_followed(args.follow, config.weight_dirs)
    service = serving_replicas(config, at, args) if several else _engine(args, config, at)
    return asyncio.run(run_service(args, service))


@contextlib.asynccontextmanager
async def _engine(
    args: argparse.Namespace, config: EngineConfig, at: Listening
) -> AsyncIterator[Up]:
    from rollout.api import AsyncRollout
    from rollout.api.embedded import EmbeddedBackend
    from rollout.server.service import serving

    backend = EmbeddedBackend(config)
    core = backend.core
    async with (
        serving(AsyncRollout.over(backend), at) as (http, grpc),
        following(args.follow, config.weight_dirs, config.timeout, backend),
    ):
        died = asyncio.wrap_future(core.died) if args.on_death == "exit" else None
        yield Up(http, grpc, backend, str(core.memory), died)
