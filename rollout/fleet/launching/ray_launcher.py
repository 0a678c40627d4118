"""Engines on the nodes of a Ray cluster: one actor each, with ``rollout serve`` as its child.

    front  RayLauncher -> placement group -> MemberActor, on a node -> rollout serve -> its ranks
             ^                                                             |
             +------------------- gRPC, with a token (TLS) ----------------+

A placement group that waits for room is what Ray's autoscaler adds nodes for; it is given back with
its engine. All of it ends with the front; where the fleet is kept (``take_over``), with one that
ends in order, while of one that is killed the next finds all, or each ends when none has come.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.config import EngineConfig
from rollout.distributed.child_environment import hub_tokens
from rollout.engine.executors import ray as executor
from rollout.engine.executors.ray import (
    connected,
    free,
    is_placed,
    named,
    on_gpus,
    passed_on,
    ranks_held,
)
from rollout.engine.executors.ray_autoscaler import autoscaler
from rollout.errors import ConfigError, EngineClosed, RolloutError, WorkerDied
from rollout.fleet.launching.engine_process import END_WAIT, EngineProcess
from rollout.fleet.launching.ray_kept import Kept, Survivor
from rollout.fleet.launching.replicas import End

_CHECK = 0.2  # seconds between looks at a process of this machine
_LOOK = 0.5  # seconds between looks at what has become of something
_CALLS = 8  # of one actor, at a time; those of a front that was killed may not have ended
_VISIT = 10.0  # seconds after which a front looks in on an actor again
ORPHANED = 600.0  # seconds without a front, after which an engine of a kept fleet ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What an engine asks Ray for: ``bundle`` on one node for all of its ranks, or, where it
    ``spans`` nodes, on as few as can be for each of ``ranks``.
    """

    bundle: Mapping[str, float]
    ranks: int
    spans: bool

    @classmethod
    def of(cls, config: EngineConfig, *, gpus: bool) -> Ask:
        ranks, spans = config.num_ranks, config.executor == "ray"
        here = 1 if spans else ranks
        each = {"CPU": float(here * (config.num_threads or 1)), "GPU": float(here * gpus)}
        return cls(bundle={name: n for name, n in each.items() if n}, ranks=ranks, spans=spans)

    @property
    def bundles(self) -> list[dict[str, float]]:
        return [dict(self.bundle)] * (self.ranks if self.spans else 1)

    def __str__(self) -> str:
        whole = named(dict(self.bundle))
        return f"{whole} for each of {self.ranks} ranks" if self.spans else f"{whole} on one node"


class RayLauncher:
    """``rollout serve WORDS`` for engines of ``config``, reached with a token of their own. They
    are spread over nodes. Ray is that of ``address``; see ``connected``.
    """

    def __init__(self, config: EngineConfig, words: Sequence[str], address: str | None) -> None:
        self._ray = ray = connected(address, "a fleet on Ray")
        self.ask = Ask.of(config, gpus=on_gpus(ray, config.device))
        self._journal = None if config.journal is None else Path(config.journal)
        self._words = [*words]
        self._token = secrets.token_hex(16)
        self._nodes: dict[str, str] = {}  # by the name of an engine
        self._drained: dict[str, float] = {}
        self._looked = float("-inf")
        self._one_had_room = False
        self.kept: Kept | None = None
        self._survivors: dict[str, Survivor] = {}
        self._lock = threading.Lock()

    def take_over(self, record: str, most: int) -> list[str]:
        """Have engines outlive a front that is killed: the next one with this ``record``, which it
        holds, calls this and launches those first that it is told the names of.

        ``ConfigError`` where they were started with other words, or are more than ``most``.
        """
        self.kept = kept = Kept.of(record)
        self._token = kept.token
        found = kept.survivors(self._ray)
        for each in found:
            if [*each.words[: len(self._words)]] != self._words:
                raise ConfigError(
                    f"engines of the fleet of {record} run still, and were started with other "
                    f"words ({' '.join(each.words)}): start the front as it was, or end it by "
                    f"SIGTERM first; without a front they end within {ORPHANED:g} s"
                )
        if (count := len({each.name for each in found})) > most:
            raise ConfigError(
                f"{count} engines of the fleet of {record} run still, and --max-replicas is "
                f"{most}: start the front with --max-replicas {count}, and have fewer by POST "
                "/fleet/replicas, which lets none go that alone holds what is live"
            )
        for each in sorted(found, key=lambda each: (len(each.name), each.name)):
            if each.name not in self._survivors:
                self._survivors[each.name] = each
            else:
                self._adopted(each).end()
        return [*self._survivors]

    def launch(self, name: str) -> RayReplica:
        if (found := self._survivors.pop(name, None)) is not None:
            return self._adopted(found)
        ray, kept = self._ray, self.kept
        group = f"rollout-{secrets.token_hex(8)}-{name}" if kept is None else kept.group(name)
        words = [*self._words]
        if self._journal is not None:
            words += ["--journal", str(self._journal / name)]
        if self.ask.spans:
            address = ray.get_runtime_context().gcs_address
            words += ["--executor", "ray", "--ray-address", address, "--ray-placement-group", group]
        placement = ray.util.placement_group(
            self.ask.bundles, name=group, lifetime=None if kept is None else "detached",
            **({"strategy": "PACK"} if self.ask.spans else {
                "strategy": "STRICT_PACK", "_soft_target_node_id": self._target(),
            })
        )  # fmt: skip
        return RayReplica(self, name, words, self._token, placement)

    def why_waiting(self, placement: Any) -> str:
        """What is asked for, what is there, and what is about to come."""
        ray, ask = self._ray, self.ask
        there = {n: ray.cluster_resources().get(n, 0.0) for n in ask.bundle}
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        text = (
            f"it waits for Ray to find room: it asks for {ask}; the cluster's {nodes} nodes have "
            f"{named(there)}, of which {named(free(ray, dict(ask.bundle)))} are free"
        )
        if not ask.spans and ask.ranks > 1 and not any(map(self._fits, ray.nodes())):
            text += "; with --executor ray the ranks of one engine may lie on several nodes"
        scaling = autoscaler(ray, placement)
        return text if scaling is None else f"{text}; {scaling}"

    def may_come(self, placement: Any) -> bool:
        """Whether there may ever be room: some had it, the nodes that are there have it, in use or
        not, or an autoscaler may bring others.
        """
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if self._one_had_room or ranks_held(nodes, self.ask.bundle) >= len(self.ask.bundles):
            return True
        scaling = autoscaler(self._ray, placement)
        return scaling is not None and not scaling.infeasible

    def placed(self, name: str, placement: Any) -> str:
        """The node that ``name`` has its place on."""
        table = self._ray.util.placement_group_table(placement)["bundles_to_node_id"]
        with self._lock:
            self._one_had_room = True
            self._nodes[name] = str(table[0])
            return self._nodes[name]

    def gave_up(self, name: str) -> None:
        with self._lock:
            self._nodes.pop(name, None)

    def notice(self, node: str) -> float | None:
        """Seconds until that node goes, where the cluster has been told that it does."""
        with self._lock:
            if time.monotonic() - self._looked > _LOOK:
                self._looked, self._drained = time.monotonic(), _draining(self._ray)
            until = self._drained.get(node)
        if until is None:
            return None
        return max(until - time.time(), 0.0) if until else float("inf")

    # ---- helpers ----

    def _adopted(self, one: Survivor) -> RayReplica:
        return RayReplica(self, one.name, one.words, self._token, one.placement, one.actor)

    def _target(self) -> str | None:
        """The node with the fewest of our engines among those that could have one more."""
        alive = [node for node in self._ray.nodes() if node["Alive"] and self._fits(node)]
        drained = _draining(self._ray)
        with self._lock:
            taken = list(self._nodes.values())
        alive = [node for node in alive if node["NodeID"] not in drained]
        alive.sort(key=lambda node: (taken.count(node["NodeID"]), node["NodeID"]))
        return alive[0]["NodeID"] if alive else None

    def _fits(self, node: Mapping[str, Any]) -> bool:
        has = node["Resources"]
        return all(has.get(name, 0.0) >= n for name, n in self.ask.bundle.items())


class RayReplica:
    """One such engine, from the time that it is asked for. ``actor``: where it runs already."""

    http, pid = "", None  # its node's

    def __init__(
        self,
        launcher: RayLauncher,
        name: str,
        words: Sequence[str],
        token: str,
        placement: Any,
        actor: Any = None,
    ) -> None:
        self.token, self.waits_for = token, ""
        self._launcher, self._ray, self._name = launcher, launcher._ray, name
        self._words, self._placement = words, placement
        self._actor = actor
        self._node = ""
        self._lock = threading.Lock()
        self._over = False

    def ready(self) -> str:
        ray, ask = self._ray, self._launcher.ask
        judged = time.monotonic() + executor.PATIENCE
        while not is_placed(ray, self._placement):
            self.waits_for = self._launcher.why_waiting(self._placement)
            if time.monotonic() > judged and not self._launcher.may_come(self._placement):
                raise ConfigError(f"{self._name} would never start: {self.waits_for}")
            self._pause()
        self.waits_for, self._node = "", self._launcher.placed(self._name, self._placement)
        if self._launcher.kept is not None:
            visits = threading.Thread(target=self._visit, name=f"{self._name}-visits", daemon=True)
            visits.start()
        if self._actor is not None:
            return str(self._got(self._actor.ready.remote()))
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._placement, placement_group_bundle_index=0
        )
        takes = {} if ask.spans else dict(ask.bundle)  # else its ranks take it
        with self._lock:
            if self._over:
                raise EngineClosed(f"{self._name} was ended while it started")
            self._actor = ray.remote(MemberActor).options(
                num_cpus=takes.get("CPU", 0), num_gpus=takes.get("GPU", 0), max_restarts=0,
                max_concurrency=_CALLS, scheduling_strategy=strategy,
                runtime_env={"env_vars": passed_on()}, **self._detached(),
            ).remote(
                self._name, self._words, self.token, os.getcwd(), self._placement,
                None if self._launcher.kept is None else ORPHANED,
            )  # fmt: skip
            waiting = self._actor.ready.remote()
        return str(self._got(waiting))

    def wait(self) -> End:
        ray = self._ray
        while True:
            waiting = self._actor.wait.remote(_VISIT)
            while not ray.wait([waiting], timeout=2 * _LOOK)[0]:
                notice = self._launcher.notice(self._node)
                if notice is not None:
                    return End(why="its node is about to leave the cluster", notice=notice)
            try:
                if (status := ray.get(waiting)) is not None:
                    return End(why=f"its process has ended with status {status}")
            except ray.exceptions.RayError as error:
                return End(why=_lost(error))

    def end(self) -> None:
        with self._lock:
            over, self._over = self._over, True
        if over:
            return
        if self._actor is not None:
            with suppress(Exception):  # it is gone, or its cluster
                self._ray.wait([self._actor.end.remote()], timeout=END_WAIT + 2.0)
            with suppress(Exception):
                self._ray.kill(self._actor, no_restart=True)
        with suppress(Exception):
            self._ray.util.remove_placement_group(self._placement)
        self._launcher.gave_up(self._name)

    def _got(self, waiting: Any) -> Any:
        ray = self._ray
        while not ray.wait([waiting], timeout=_LOOK)[0]:
            self._pause(0.0)
        try:
            return ray.get(waiting)
        except ray.exceptions.RayTaskError as error:
            if isinstance(cause := error.cause, RolloutError):
                raise cause from None
            raise WorkerDied(f"{self._name} could not start in Ray: {cause}") from error
        except ray.exceptions.RayError as error:
            raise WorkerDied(f"{self._name} ended while it started: {_lost(error)}") from error

    def _visit(self) -> None:
        """It would end without a front: also while it starts, and while it leaves."""
        with suppress(Exception):  # the cluster is gone
            while not self._over:
                if self._actor is not None:
                    self._actor.wait.remote(0.0)
                time.sleep(_VISIT)

    def _detached(self) -> dict[str, Any]:
        """Of the actor's options."""
        if self._launcher.kept is None:
            return {}
        group = self._ray.util.placement_group_table(self._placement)["name"]
        return {"name": group, "namespace": executor.NAMESPACE, "lifetime": "detached"}

    def _pause(self, seconds: float = _LOOK) -> None:
        if self._over:
            raise EngineClosed(f"{self._name} was ended while it started")
        time.sleep(seconds)


class MemberActor:
    """What Ray starts on a node: ``rollout serve WORDS``, which listens at the node's address.

    ``orphaned``: seconds without a call of ``wait`` after which it ends, and with it its
    ``placement``; None: it ends with the front.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        token: str,
        directory: str,
        placement: Any,
        orphaned: float | None,
    ) -> None:
        import ray

        if os.path.isdir(directory):
            os.chdir(directory)  # relative paths mean what they mean where the front runs
        host = str(ray.util.get_node_ip_address())
        settings = {"ROLLOUT_TOKEN": token, **hub_tokens()}
        self._words, self._placement = [*words], placement
        self._visited = time.monotonic()
        self._address, self._starting = "", threading.Lock()
        self._process = EngineProcess(name, words, settings, host)
        if orphaned is not None:
            threading.Thread(target=self._watch, args=(orphaned,), daemon=True).start()

    def about(self) -> tuple[Sequence[str], Any]:
        """The words and the placement group, for a front that may then be none of this fleet's."""
        return self._words, self._placement

    def ready(self) -> str:
        self._visited = time.monotonic()
        with self._starting:  # the next front asks, too
            self._address = self._address or self._process.ready()
        return self._address

    def wait(self, seconds: float) -> int | None:
        """The status with which it has ended within ``seconds``."""
        until = time.monotonic() + seconds
        while True:
            self._visited = time.monotonic()
            if (status := self._process.ended()) is not None or time.monotonic() >= until:
                return status
            time.sleep(_CHECK)

    def end(self) -> None:
        self._process.end()

    def _watch(self, orphaned: float) -> None:
        import ray

        while time.monotonic() - self._visited < orphaned:
            time.sleep(_CHECK)
        self._process.end()
        ray.util.remove_placement_group(self._placement)  # and this actor with it
        time.sleep(END_WAIT)
        os._exit(0)


def _draining(ray: Any) -> dict[str, float]:
    """Nodes that the cluster has been told to give up, and until when (0: no time is named), in
    seconds of the wall clock. Ray has no public call for it; without this one there is no notice.
    """
    try:
        found = ray._private.state.state.get_draining_nodes()
    except (AttributeError, RuntimeError, ray.exceptions.RayError):
        return {}
    return {str(node): milliseconds / 1000 for node, milliseconds in found.items()}


def _lost(error: Exception) -> str:
    """What Ray says of an actor that has gone is a page long, and begins with its number."""
    return f"Ray has lost its actor, or its node ({type(error).__name__})"
