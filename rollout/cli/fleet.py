"""``rollout serve --replicas N`` and ``rollout fleet``: several engines behind one address."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.cli.client import client_tls
from rollout.cli.flags import Row, add_rows, engine_flags, environment
from rollout.cli.service import LISTENING, Up, listening_of, run_service
from rollout.config import timeout_problem
from rollout.errors import ConfigError
from rollout.rpc.address import split_address

if TYPE_CHECKING:
    from rollout.config import EngineConfig
    from rollout.fleet.backend import FleetBackend
    from rollout.fleet.fleet import Fleet
    from rollout.rpc.tls import ClientTls
    from rollout.server.service import Listening

REPLICAS: tuple[Row, ...] = (
    ("--replicas", "N", 1, "engines of this model on this host, behind one address and updated as "
     "one; each is started again when it ends"),
    ("--quorum", "N", None, "of several engines, how many must hold a version for it to commit: "
     "others are fenced and catch up (default: 2, or 1 where there is one)"),
    ("--lease", "X", 2.0, "seconds for which an engine that hears nothing of the fleet serves on"),
    ("--patience", "X", 0.25, "share of an update's timeout for which each step of it waits for "
     "engines that are later than half of them and a quorum; they leave service and catch up"),
)  # fmt: skip
FLEET: tuple[Row, ...] = (
    *REPLICAS[1:],
    ("--start-timeout", "X", 600.0,
     "seconds within which as many engines as --quorum have to serve; others may come later"),
    ("--record", "DIR", ".rollout-fleet", "where the fleet's promises are kept, on a local disk"),
    ("--engine-token", "TOKEN", None, "control token of the engines (default: "
     "ROLLOUT_ENGINE_TOKEN)"),
    ("--engine-tls-ca", "PEM", None,
     "reach engines over TLS; the authority that signed their certificates"),
    ("--engine-tls-cert", "PEM", None, "certificate to show them, where they ask for one"),
    ("--engine-tls-key", "PEM", None, "its key"),
    ("--engine-tls-server-name", "NAME", None,
     "what their certificates are made out to, where those are not their addresses"),
)  # fmt: skip


@contextlib.asynccontextmanager
async def serving_replicas(
    config: EngineConfig, at: Listening, args: argparse.Namespace
) -> AsyncIterator[Up]:
    """``args.replicas`` engines that this process starts, served at one address."""
    from rollout.distributed import choose_device
    from rollout.fleet.backend import FleetBackend
    from rollout.fleet.replicas import Replicas, gpus_each, threads_each, visible_gpus
    from rollout.loader import resolve_model

    where = str(await asyncio.to_thread(
        resolve_model, config.model, config.revision, config.load_format
    ))  # fmt: skip
    flags = engine_flags(config)
    if config.served_model_name is None:
        flags += ["--served-model-name", config.model]
    placed = config.resolved_executor == "ray"  # which gives each rank its devices
    on_cpu = not placed and choose_device(config.device).type == "cpu"
    ranks = config.tensor_parallel_size
    gpus = [] if on_cpu or placed else gpus_each(visible_gpus(), args.replicas, ranks)
    if config.num_threads is None and on_cpu:
        flags += ["--num-threads", str(threads_each(args.replicas))]
    # All members end with this process: what it has promised dies with them.
    with tempfile.TemporaryDirectory(prefix="rollout-fleet-") as record:
        fleet = _fleet(record, args)
        journal = None if config.journal is None else Path(config.journal)
        replicas = Replicas(fleet, where, flags, args.replicas, gpus, journal)
        backend = FleetBackend(
            fleet, weight_dirs=config.weight_dirs, start_timeout=config.start_timeout,
            members=replicas.start,
        )  # fmt: skip
        try:
            async with _served(backend, at) as up:
                yield up
        finally:
            await asyncio.to_thread(replicas.close)


@contextlib.asynccontextmanager
async def serving_engines(at: Listening, args: argparse.Namespace) -> AsyncIterator[Up]:
    """Engines that run already, at ``args.engine``, served at one address."""
    from rollout.fleet.backend import FleetBackend

    token = args.engine_token or environment("ENGINE_TOKEN")
    fleet = _fleet(args.record, args, client_tls(args, "engine_tls"))
    backend = FleetBackend(fleet, weight_dirs=args.weight_dir, start_timeout=args.start_timeout)
    for address in args.engine:
        fleet.add(address, token)
    async with _served(backend, at) as up:
        yield up


def add_fleet(commands: Any, add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = add_command(commands, "fleet", serve_fleet, "serve engines that run as one")
    parser.add_argument(
        "--engine", action="append", default=[], metavar="HOST:PORT",
        help="gRPC address of an engine; again for each",
    )  # fmt: skip
    parser.add_argument(
        "--weight-dir", action="append", default=[], metavar="DIR",
        help="directory under which the front may read updates itself; may be repeated",
    )  # fmt: skip
    add_rows(parser.add_argument_group("fleet"), FLEET)
    add_rows(parser.add_argument_group("listening"), LISTENING)


def serve_fleet(args: argparse.Namespace) -> int:
    """See ``run_service``."""
    if not args.engine:
        raise ConfigError("which engines? Give --engine HOST:PORT, the gRPC address of each")
    given: set[tuple[str, int]] = set()
    for address in args.engine:
        if (where := split_address(address)) in given:
            raise ConfigError(f"--engine {address} is given twice: name each engine once")
        given.add(where)
    if problem := timeout_problem(args.start_timeout):
        raise ConfigError(f"--start-timeout {problem}")
    at = listening_of(args)
    return asyncio.run(run_service(args, serving_engines(at, args)))


def _fleet(record: str, args: argparse.Namespace, tls: ClientTls | None = None) -> Fleet:
    from rollout.fleet.fleet import Fleet
    from rollout.fleet.record import Record

    if args.lease <= 0:
        raise ConfigError("--lease must be a positive number of seconds")
    if not 0 <= args.patience <= 1:
        raise ConfigError("--patience must be a share, from 0 to 1")
    return Fleet(
        Record(record, args.lease), quorum=args.quorum, lease=args.lease, tls=tls,
        patience=args.patience,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def _served(backend: FleetBackend, at: Listening) -> AsyncIterator[Up]:
    from rollout.api import AsyncRollout
    from rollout.server.service import serving_over

    try:
        async with serving_over(AsyncRollout.over(backend), at) as addresses:
            yield Up(*addresses)
    finally:
        backend.close()
