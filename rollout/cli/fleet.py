"""``rollout serve --replicas N`` and ``rollout fleet``: several engines behind one address, or
behind several.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.cli.client import client_tls
from rollout.cli.flags import (
    ENGINE_FLAGS,
    Row,
    add_engine_flags,
    add_model,
    add_rows,
    attribute,
    engine_config,
    engine_flags,
    environment,
    given_of,
    model_of,
    refuse,
    refuse_engine_flags,
)
from rollout.cli.following import check_followed, following
from rollout.cli.service import Up, add_listening, check_slots, listening_of, run_service
from rollout.config import DEFAULT_TIMEOUT, timeout_problem
from rollout.distributed import is_loopback
from rollout.errors import ConfigError
from rollout.rpc.address import split_address

if TYPE_CHECKING:
    from rollout.config import EngineConfig
    from rollout.fleet.fleet import Fleet
    from rollout.fleet.fronts.front import Front
    from rollout.fleet.launching.replicas import Launcher
    from rollout.rpc.tls import ClientTls
    from rollout.server.service import Listening

log = logging.getLogger(__name__)

REPLICAS: tuple[Row, ...] = (
    ("--replicas", "N", 1, "engines of this model on this host, behind one address and updated as "
     "one; each is started again when it ends"),
    ("--min-replicas", "N", None, "to how few of them POST /fleet/replicas may go (default: "
     "--quorum, or 1)"),
    ("--max-replicas", "N", None, "and to how many (default: --replicas)"),
    ("--quorum", "N", None, "of several engines, how many must hold a version for it to commit: "
     "others are fenced and catch up (default: 2, or 1 where there is one)"),
    ("--lease", "X", 2.0, "seconds for which an engine that hears nothing of the fleet serves on"),
    ("--patience", "X", 0.25, "share of an update's timeout for which each step of it waits for "
     "engines that are later than half of them and a quorum; they leave service and catch up"),
)  # fmt: skip
FLEET: tuple[Row, ...] = (
    ("--replicas", "N", None, "engines of MODEL on the Ray cluster, spread over its nodes"),
    *REPLICAS[1:],
    ("--record", "DIR", None, "where the fleet's promises are kept, on a local disk (default with "
     "--engine: .rollout-fleet). With --ray engines then outlive a front that is killed, for 10 "
     "minutes, and the next with this DIR takes them over"),
    ("--engine-token", "TOKEN", None, "control token of the engines at --engine (default: "
     "ROLLOUT_ENGINE_TOKEN)"),
    ("--engine-tls-ca", "PEM", None,
     "reach engines over TLS; the authority that signed their certificates"),
    ("--engine-tls-cert", "PEM", None, "certificate to show them, where they ask for one"),
    ("--engine-tls-key", "PEM", None, "its key"),
    ("--engine-tls-server-name", "NAME", None,
     "what their certificates are made out to, where those are not their addresses"),
)  # fmt: skip

COORDINATOR: tuple[Row, ...] = (
    ("--coordinator", "HOST:PORT", None, "route only: gRPC address of the front that coordinates "
     "the fleet (`rollout fleet`; `rollout serve --replicas` on this host); it tells who its "
     "members are, and is handed all that changes them; any number of such fronts may come and go"),
    ("--coordinator-token", "TOKEN", None, "its control token (default: "
     "ROLLOUT_COORDINATOR_TOKEN)"),
    ("--coordinator-tls-ca", "PEM", None,
     "reach it over TLS; the authority that signed its certificate"),
    ("--coordinator-tls-cert", "PEM", None, "certificate to show it, where it asks for one"),
    ("--coordinator-tls-key", "PEM", None, "its key"),
    ("--coordinator-tls-server-name", "NAME", None,
     "what its certificate is made out to, where that is not its address"),
)  # fmt: skip

RECORD = ".rollout-fleet"
_FRONTS = ("weight_dirs", "start_timeout")  # settings of an engine that are a front's, too
_OF_RAY = tuple(row for row in FLEET if row[0].endswith("-replicas"))
_ROUTES_TOO = ("--engine-tls-cert", "--engine-tls-key")  # of the fleet's, what a route uses


@contextlib.asynccontextmanager
async def serving_replicas(
    config: EngineConfig, at: Listening, args: argparse.Namespace
) -> AsyncIterator[Up]:
    """``args.replicas`` engines that this process starts, served at one address."""
    from rollout.distributed import choose_device
    from rollout.fleet.launching.local_launcher import (
        LocalLauncher,
        gpus_each,
        threads_each,
        visible_gpus,
    )
    from rollout.loader import resolve_model

    where = str(await asyncio.to_thread(
        resolve_model, config.model, config.revision, config.load_format
    ))  # fmt: skip
    words = [where, *_engine_words(config)]
    placed = config.resolved_executor == "ray"  # which gives each rank its devices
    on_cpu = not placed and choose_device(config.device).type == "cpu"
    ranks, most = config.num_ranks, args.max_replicas or args.replicas
    gpus = [] if on_cpu or placed else gpus_each(visible_gpus(), most, ranks)
    if config.num_threads is None and on_cpu:
        words += ["--num-threads", str(threads_each(args.replicas, ranks))]
    journal = None if config.journal is None else Path(config.journal)
    launcher = LocalLauncher(words, gpus, journal)
    async with _serving(launcher, args.replicas, config, at, args) as up:
        yield up


@contextlib.asynccontextmanager
async def serving_on_ray(
    config: EngineConfig, at: Listening, args: argparse.Namespace
) -> AsyncIterator[Up]:
    """``args.replicas`` engines on the nodes of a Ray cluster, served at one address."""
    from rollout.fleet.launching.ray_launcher import RayLauncher

    # Whatever the nodes have there is theirs: only a path of this machine's is made whole.
    local = Path(config.model).exists()
    model = os.path.abspath(config.model) if local else config.model
    on_nodes = replace(config, executor="auto", ray_address=None)
    words = [model, *_engine_words(on_nodes), *_reached_by(args)]
    words += [] if config.num_threads else ["--num-threads", "1"]
    launcher = await asyncio.to_thread(RayLauncher, config, words, args.ray or config.ray_address)
    count = args.replicas or 1
    enough = args.quorum or min(2, count)
    tls = client_tls(args, "engine_tls")
    keep = None if args.record is None else launcher.take_over
    async with _serving(launcher, count, config, at, args, enough=enough, tls=tls, keep=keep) as up:
        yield up


@contextlib.asynccontextmanager
async def _serving(
    launcher: Launcher,
    count: int,
    config: EngineConfig,
    at: Listening,
    args: argparse.Namespace,
    *,
    enough: int | None = None,
    tls: ClientTls | None = None,
    keep: Callable[[str, int], Sequence[str]] | None = None,
) -> AsyncIterator[Up]:
    """``count`` engines of ``launcher``; of the first ``enough`` are waited for. ``keep``: of
    engines that may outlive this process, with the record and the most that there may be; it names
    those that have.
    """
    from rollout.fleet.fronts.backend import FleetBackend
    from rollout.fleet.launching.engine_process import START_LIMIT
    from rollout.fleet.launching.record_folder import record_folder
    from rollout.fleet.launching.replicas import Replicas

    needed = args.quorum or 1
    least = needed if args.min_replicas is None else args.min_replicas
    if least < needed:
        raise ConfigError(
            f"--min-replicas {least} is below --quorum {needed}: no update could commit"
        )
    with contextlib.ExitStack() as stack:
        # Where all members end with this process, what it has promised dies with them.
        record = stack.enter_context(record_folder()) if keep is None else args.record
        fleet = _fleet(record, args, tls)
        found: Sequence[str] = ()
        if keep is not None:
            found = await asyncio.to_thread(keep, record, args.max_replicas or count)
        replicas = Replicas(
            fleet, launcher, count, least=least, most=args.max_replicas, enough=enough,
            start_timeout=START_LIMIT if enough is None else config.start_timeout, found=found,
        )  # fmt: skip
        backend = FleetBackend(
            fleet, weight_dirs=config.weight_dirs, start_timeout=config.start_timeout,
            replicas=replicas,
        )  # fmt: skip
        try:
            async with _served(backend, at, args.follow, config.weight_dirs, config.timeout) as up:
                yield up
        finally:
            await asyncio.to_thread(replicas.close)


@contextlib.asynccontextmanager
async def serving_engines(at: Listening, args: argparse.Namespace) -> AsyncIterator[Up]:
    """Engines that run already, at ``args.engine``, served at one address."""
    from rollout.fleet.fronts.backend import FleetBackend

    token = args.engine_token or environment("ENGINE_TOKEN")
    fleet = _fleet(args.record or RECORD, args, client_tls(args, "engine_tls"))
    dirs = _given(args, "weight_dirs")
    backend = FleetBackend(fleet, weight_dirs=dirs, start_timeout=_given(args, "start_timeout"))
    for address in args.engine:
        fleet.add(address, token)
    async with _served(backend, at, args.follow, dirs, DEFAULT_TIMEOUT) as up:
        yield up


@contextlib.asynccontextmanager
async def serving_routes(at: Listening, args: argparse.Namespace) -> AsyncIterator[Up]:
    """The fleet of the front at ``args.coordinator``, served at one more address."""
    from rollout.fleet.fronts.routed_fleet import RoutedFleet
    from rollout.fleet.fronts.routing_front import RoutingFront
    from rollout.rpc.client import RolloutClient
    from rollout.rpc.tls import ServerTls

    token = args.coordinator_token or environment("COORDINATOR_TOKEN")
    tls = client_tls(args, "coordinator_tls")
    coordinator = RolloutClient(args.coordinator, token, tls=tls, keeps_epoch=False)
    cert = args.engine_tls_cert or environment("ENGINE_TLS_CERT")
    key = args.engine_tls_key or environment("ENGINE_TLS_KEY")
    if (cert is None) != (key is None):
        raise ConfigError("--engine-tls-cert and --engine-tls-key go together")
    shown = None if cert is None or key is None else ServerTls(cert=cert, key=key)
    front = RoutingFront(
        RoutedFleet(coordinator, shown),
        weight_dirs=_given(args, "weight_dirs"),
        start_timeout=_given(args, "start_timeout"),
    )
    async with _served(front, at, None, (), DEFAULT_TIMEOUT) as up:
        yield up


def add_fleet(commands: Any, add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Register the command."""
    text = "serve engines that run as one, start them on a Ray cluster, or route to a fleet"
    parser = add_command(commands, "fleet", serve_fleet, text)
    add_model(parser)
    parser.add_argument(
        "--engine", action="append", default=[], metavar="HOST:PORT",
        help="gRPC address of an engine that runs; again for each",
    )  # fmt: skip
    parser.add_argument(
        "--ray", nargs="?", const="", metavar="ADDRESS",
        help="start engines of MODEL on this Ray cluster (without ADDRESS: RAY_ADDRESS, else this "
        "machine's)",
    )  # fmt: skip
    add_rows(parser.add_argument_group("fleet"), FLEET)
    add_rows(parser.add_argument_group("one more front of a fleet"), COORDINATOR)
    add_listening(parser)
    add_engine_flags(parser)


def serve_fleet(args: argparse.Namespace) -> int:
    """See ``run_service``."""
    for flag in ("--engine-token", "--coordinator-token", "--record"):
        given = getattr(args, attribute(flag))
        if given is not None and not given.strip():
            raise ConfigError(f"{flag} is empty: give it a value, or leave it out")
    if args.coordinator is not None:
        return _serve_routes(args)
    refuse(args, COORDINATOR, "of a front that routes only: give --coordinator")
    if args.ray is not None:
        if args.engine:
            raise ConfigError("--engine has engines that run, and --ray starts them: give one")
        return _serve_on_ray(args)
    if args.model is not None or args.model_flag is not None:
        raise ConfigError(
            "engines at --engine have their model; to start them from MODEL add --ray (on a Ray "
            "cluster), or use `rollout serve MODEL --replicas N` (on this host). Of several "
            "engines each has an --engine of its own: --engine A --engine B"
        )
    if not args.engine:
        raise ConfigError(
            "which engines? Give --engine HOST:PORT, the gRPC address of each, or --coordinator "
            "HOST:PORT for one more front of a fleet"
        )
    refuse_engine_flags(args, "--engine", _FRONTS)
    refuse(args, _OF_RAY, "of engines that --ray starts, not of --engine")
    if args.lora_modules:  # a front that is started again would undo what was trained since
        raise ConfigError(
            "--lora-modules is of engines that this command starts: load adapters of those at "
            "--engine by /v1/load_lora_adapter"
        )
    named: set[tuple[str, int]] = set()
    for address in args.engine:
        if "," in address:
            raise ConfigError(f"--engine {address}: give each its own, --engine A --engine B")
        if (where := split_address(address)) in named:
            raise ConfigError(f"--engine {address} is given twice: name each engine once")
        named.add(where)
    if problem := timeout_problem(_given(args, "start_timeout")):
        raise ConfigError(f"--start-timeout {problem}")
    check_followed(args.follow, _given(args, "weight_dirs"))
    at = listening_of(args)
    near = [address for address in args.engine if is_loopback(split_address(address)[0])]
    if 0 < len(near) < len(args.engine):
        log.warning("--engine %s: other hosts' engines do not reach it there: give its address in "
                    "their network", ", ".join(near))  # fmt: skip
    return asyncio.run(run_service(args, serving_engines(at, args)))


def _serve_routes(args: argparse.Namespace) -> int:
    given = given_of(args, (row for row in FLEET if row[0] not in _ROUTES_TOO))
    given += [f"--{n}" for n in ("engine", "lora-modules", "follow") if getattr(args, attribute(n))]
    if args.model is not None or args.model_flag is not None or args.ray is not None or given:
        raise ConfigError(
            f"{', '.join(given) or 'a MODEL or --ray'}: of the front that coordinates, not of one "
            "that routes for it (--coordinator)"
        )
    refuse_engine_flags(args, "--coordinator", _FRONTS)
    if problem := timeout_problem(_given(args, "start_timeout")):
        raise ConfigError(f"--start-timeout {problem}")
    split_address(args.coordinator)
    at = listening_of(args)
    return asyncio.run(run_service(args, serving_routes(at, args)))


def _serve_on_ray(args: argparse.Namespace) -> int:
    config = engine_config(args, model=model_of(args))
    if config.executor not in ("auto", "multiprocess", "ray"):
        raise ConfigError(f"--executor {config.executor}: --ray goes with auto or ray")
    if config.ray_placement_group is not None:
        raise ConfigError(
            "--ray-placement-group is of one engine's ranks; each that --ray starts has one of its "
            "own: leave it out"
        )
    if args.replicas is not None and args.replicas < 1:
        raise ConfigError("--replicas must be 1 or more")
    if args.engine_token is not None:
        raise ConfigError(
            "--engine-token is of engines that run already (--engine); those that --ray starts get "
            "a token of their own"
        )
    at = listening_of(args)
    check_slots(at, config)
    check_followed(args.follow, config.weight_dirs)
    return asyncio.run(run_service(args, serving_on_ray(config, at, args)))


def _given(args: argparse.Namespace, name: str) -> Any:
    """A setting of engines' that is the front's, too."""
    default = next(f.default for f in ENGINE_FLAGS if f.name == name)
    return getattr(args, name, default)


def _engine_words(config: EngineConfig) -> list[str]:
    """Of an engine whose model is named as it was here, and whose journal is its own."""
    words = engine_flags(replace(config, journal=None))
    if config.served_model_name is None:
        words += ["--served-model-name", config.model]
    return words


def _reached_by(args: argparse.Namespace) -> list[str]:
    """How engines of ours are served on other hosts: as the front reaches them."""
    cert, key, ca = args.engine_tls_cert, args.engine_tls_key, args.engine_tls_ca
    if (cert, key, ca) == (None, None, None):
        return ["--insecure"]
    if None in (cert, key, ca):
        raise ConfigError(
            "engines on Ray speak TLS with all three of --engine-tls-ca, --engine-tls-cert and "
            "--engine-tls-key: files that every node has at the same place"
        )
    return ["--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca]


def _fleet(record: str, args: argparse.Namespace, tls: ClientTls | None = None) -> Fleet:
    from rollout.fleet.coordination.actions import MAX_LEASE
    from rollout.fleet.coordination.record import Record
    from rollout.fleet.fleet import Fleet

    if not 0 < args.lease <= MAX_LEASE:
        raise ConfigError(
            f"--lease must be above 0 and at most {MAX_LEASE:g} s, got {args.lease:g}"
        )
    if args.quorum is not None and args.quorum < 1:
        raise ConfigError(f"--quorum must be 1 or more, got {args.quorum}")
    if not 0 <= args.patience <= 1:
        raise ConfigError("--patience must be a share, from 0 to 1")
    return Fleet(
        Record(record, args.lease), quorum=args.quorum, lease=args.lease, tls=tls,
        patience=args.patience,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def _served(
    backend: Front,
    at: Listening,
    follow: str | None,
    weight_dirs: Sequence[str],
    timeout: float,
) -> AsyncIterator[Up]:
    from rollout.api import AsyncRollout
    from rollout.server.service import serving

    try:
        async with (
            serving(AsyncRollout.over(backend), at) as addresses,
            following(follow, weight_dirs, timeout, backend),
        ):
            yield Up(*addresses, backend)
    finally:
        backend.close()
