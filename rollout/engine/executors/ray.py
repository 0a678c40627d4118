"""Ranks as actors of a Ray cluster: tensor parallelism over several machines.

    EngineCore -> RayExecutor == TCP ==> RankActor, a Ray worker with a RankHost, on any node

Ray places the ranks, gives each its devices and ends them. Calls, tensors and replies never pass
through it: each rank connects to a ``Door`` of the engine's, with a secret that Ray brings it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from rollout.config import EngineConfig
from rollout.distributed import LOOPBACK
from rollout.distributed.interpreter import SWITCH_INTERVAL
from rollout.distributed.rendezvous import Door, enter
from rollout.engine.executors.external import ExternalExecutor, RankHost
from rollout.engine.executors.multiprocess import INSTANCE
from rollout.engine.executors.rank_link import COLLECTIVES, DEPRECATED
from rollout.engine.executors.ray_autoscaler import autoscaler
from rollout.errors import ConfigError, DeadlineExceeded, EngineClosed, WorkerDied
from rollout.weight_sync.transports.host import host_id

log = logging.getLogger(__name__)
NAMESPACE = "rollout"  # of named placement groups, in every process that connects by itself
_PASSED_ON = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TP_SOCKET_")  # settings of collectives
PATIENCE = 25.0  # seconds for nodes that come, until a cluster is judged by those that are there
_JUDGED = 5.0  # seconds between such judgements
_OWN_END = 1.0  # seconds in which an engine that has not been killed gives back what it took
_LOOK = 0.2  # seconds between looks at what has become of the ranks that start
# A node without power says nothing: its socket is given up after 5 s of silence and 3 probes.
_PROBES = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}


class RayExecutor(ExternalExecutor):
    """One actor for each rank, in a placement group: ranks of one node are neighbours.

    Each takes ``num_threads`` CPUs (1 where that is None), and one GPU where the ranks run on
    them: with ``device="auto"`` wherever the cluster has any. Ray is the one this process is
    connected to, else that of ``ray_address``. An actor that ends, or whose node does, fails all
    that is pending with ``WorkerDied``, within about 11 s where the node went silent.
    """

    def __init__(self, config: EngineConfig) -> None:
        config = replace(config, num_threads=config.num_threads or 1)
        super().__init__(config, {}, host=LOOPBACK, one_host=False)
        self._ray: Any = None
        self._gpus = False
        self._placement: Any = None
        self._is_ours = config.ray_placement_group is None
        self._actors: list[Any] = []

    def start(self) -> None:
        deadline = time.monotonic() + self._config.start_timeout
        try:
            self._ray = connected(self._config.ray_address)
            self._place(deadline)
            self._meet(deadline)
        except BaseException:
            self.close()
            raise
        super().start()

    def close(self) -> None:
        super().close()
        for actor in self._actors:
            with suppress(Exception):  # the cluster may be gone, with all of them
                self._ray.kill(actor, no_restart=True)
        if self._placement is not None and self._is_ours:
            with suppress(Exception):
                self._ray.util.remove_placement_group(self._placement)
            self._placement = None

    def _on_gpus(self) -> bool:
        return self._gpus

    # ---- helpers ----

    def _place(self, deadline: float) -> None:
        """Start the actors, in the order of their ranks."""
        ray = self._ray
        self._gpus = on_gpus(ray, self._config.device)
        each = {"CPU": float(self._config.num_threads or 1), "GPU": float(self._gpus)}
        bundle = {name: n for name, n in each.items() if n}
        self._placement = self._group(bundle)
        judged = time.monotonic() + PATIENCE
        while not is_placed(ray, self._placement):
            if self._closed:
                raise EngineClosed("the engine was closed while it started")
            if time.monotonic() > judged and self._is_ours:
                self._judge(bundle)
                judged = time.monotonic() + _JUDGED
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"Ray found no room for {self.size} ranks with {named(bundle)} each within "
                    f"start_timeout={self._config.start_timeout:g} s; free in the cluster are "
                    f"{named(free(ray, bundle))}{self._outlook()}: add nodes, or lower "
                    "tensor_parallel_size or num_threads"
                )
            time.sleep(_LOOK)
        table = ray.util.placement_group_table(self._placement)["bundles_to_node_id"]
        here = ray.get_runtime_context().get_node_id()
        nodes = [table[index] for index in range(self.size)]
        kind, ours = ray.remote(RankActor), self._placement if self._is_ours else None
        for index in _by_node(nodes, here):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._placement, placement_group_bundle_index=index
            )
            self._actors.append(
                kind.options(
                    num_cpus=each["CPU"], num_gpus=each["GPU"], max_restarts=0,
                    scheduling_strategy=strategy,
                    runtime_env={"env_vars": {**passed_on(), INSTANCE: self.instance}},
                    lifetime=None if ours is None else "detached",
                ).remote(ours, max(deadline - time.monotonic(), 0.0))
            )  # fmt: skip
        # Ranks of this node may still be another user's, or in a container: they share no memory.
        near = all(node == here for node in nodes)
        self.one_host = near and self._hosts(deadline) == {host_id()}
        self._host = LOOPBACK if self.one_host else str(ray.util.get_node_ip_address())

    def _judge(self, bundle: Mapping[str, float]) -> None:
        """``ConfigError`` where the nodes that are there could not hold the ranks if all was free,
        and no autoscaler may yet bring others.
        """
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        held = ranks_held(nodes, bundle)
        if held >= self.size:
            return
        scaling = autoscaler(self._ray, self._placement)
        if scaling is None or scaling.infeasible:
            all_of_it = {name: sum(n.get(name, 0.0) for n in nodes) for name in bundle}
            raise ConfigError(
                f"{self.size} ranks need {named(bundle)} each, and the cluster holds {held} such "
                f"at most: its {len(nodes)} nodes have {named(all_of_it)} in all, in use or not"
                f"{self._outlook()}; lower tensor_parallel_size or num_threads, or add nodes first"
            )

    def _outlook(self) -> str:
        scaling = autoscaler(self._ray, self._placement)
        return "" if scaling is None else f", and {scaling}"

    def _group(self, bundle: dict[str, float]) -> Any:
        """The placement group that the ranks lie in, a bundle for each."""
        ray, name = self._ray, self._config.ray_placement_group
        if name is None:
            return ray.util.placement_group([bundle] * self.size, strategy="PACK")
        try:
            found = ray.util.get_placement_group(name)
        except ValueError as error:
            raise ConfigError(
                f"ray_placement_group: the cluster has none named {name!r} in this process's "
                f"namespace (rollout's own is {NAMESPACE!r})"
            ) from error
        fit = [all(b.get(r, 0) >= n for r, n in bundle.items()) for b in found.bundle_specs]
        if len(fit) < self.size or not all(fit[: self.size]):
            raise ConfigError(
                f"ray_placement_group {name!r} has bundles {found.bundle_specs}, and {self.size} "
                f"ranks need one with {named(bundle)} each"
            )
        return found

    def _hosts(self, deadline: float) -> set[str]:
        """Of the actors, once they are up."""
        waiting = [actor.host.remote() for actor in self._actors]
        while True:
            done, left = self._ray.wait(waiting, num_returns=len(waiting), timeout=_LOOK)
            self._look_after(waiting, deadline)
            if not left:
                return set(self._ray.get(done))

    def _meet(self, deadline: float) -> None:
        """Have every rank connect."""
        secret = secrets.token_hex(16)
        door = Door(self._host, secret)
        try:
            left = max(deadline - time.monotonic(), 0.01)
            waiting = [
                actor.connect.remote(self._host, door.port, secret, rank, left, self._gpus)
                for rank, actor in enumerate(self._actors)
            ]
            while len(self._sockets) < self.size:
                admitted, _ = door.wait(_LOOK)
                for sock, rank in admitted:
                    if rank >= self.size or rank in self._sockets:
                        sock.close()
                        continue
                    _probe(sock)
                    self._sockets[rank] = sock
                self._look_after(waiting, deadline)
        finally:
            door.close()

    def _look_after(self, waiting: Sequence[Any], deadline: float) -> None:
        """Raise what keeps a rank from coming."""
        ray = self._ray
        if self._closed:
            raise EngineClosed("the engine was closed while it started")
        done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for reply in done:
            try:
                ray.get(reply)
            except ray.exceptions.RayError as error:
                rank = waiting.index(reply)
                raise WorkerDied(f"rank {rank} could not start in Ray: {error}") from error
        if time.monotonic() > deadline:
            missing = ", ".join(str(r) for r in range(self.size) if r not in self._sockets)
            raise DeadlineExceeded(
                f"rank {missing} did not connect to the engine at {self._host} within "
                f"start_timeout={self._config.start_timeout:g} s (phase: start); can its node "
                "reach this one's address?"
            )


class RankActor:
    """The process that Ray starts for one rank; its engine's calls come over a socket.

    ``placement``: the engine's own group. Ray ends it with the driver: where an actor or a task
    that has the engine is killed before, the ranks outlive it, and give the group back, and
    themselves with it. ``patience``: seconds until the engine should have let this one in.
    """

    def __init__(self, placement: Any, patience: float) -> None:
        self._host: RankHost | None = None
        self._let_in = threading.Event()
        if placement is not None:
            threading.Thread(
                target=self._give_back, args=(placement, patience), daemon=True
            ).start()

    def host(self) -> str:
        """``host_id`` of its process."""
        return host_id()

    def connect(
        self, host: str, port: int, secret: str, rank: int, timeout: float, gpu: bool
    ) -> None:
        """Be ``rank`` of the engine at ``host``; returns once it is let in."""
        sys.setswitchinterval(SWITCH_INTERVAL)
        for name in DEPRECATED:
            os.environ.pop(name, None)
        sock = enter(host, port, secret, rank, time.monotonic() + timeout)
        _probe(sock)
        # Ray shows a rank its own card alone, as number 0.
        self._host = RankHost(sock, torch.device("cuda", 0) if gpu else torch.device("cpu"))
        self._let_in.set()

    def _give_back(self, placement: Any, patience: float) -> None:
        import ray

        self._let_in.wait(patience)
        if self._host is not None:
            self._host.wait()
        time.sleep(_OWN_END)
        with suppress(Exception):  # it is gone, or the cluster
            ray.util.remove_placement_group(placement)
        time.sleep(_OWN_END)
        os._exit(0)


def connected(address: str | None, asks: str = "executor='ray'") -> Any:
    """The module ``ray``, connected to a cluster that runs already; ``ConfigError`` says what
    ``asks`` for it.
    """
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            f"{asks} needs Ray, which cannot be imported ({error}); "
            "in a checkout, pip install -c constraints.txt -e '.[ray]'"
        ) from error
    if not ray.is_initialized():
        try:
            ray.init(
                address=address or "auto", namespace=NAMESPACE, configure_logging=False,
                log_to_driver=True,
            )  # fmt: skip
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"{asks} found no Ray cluster at {address or 'this machine'} ({error}); start one "
                "with 'ray start --head', or name its address (--ray ADDRESS, ray_address)"
            ) from error
    return ray


def on_gpus(ray: Any, device: str) -> bool:
    """Whether ranks take GPUs: with ``"auto"`` where the cluster has any by now."""
    if device == "auto" and not ray.cluster_resources().get("GPU", 0.0):
        if autoscaler(ray) is not None:
            log.warning(
                "the cluster has no GPU now, so that ranks take CPUs; device='cuda' asks its "
                "autoscaler for nodes that have some"
            )
        return False
    return device != "cpu"


def passed_on() -> dict[str, str]:
    """What Ray's own environment on another node cannot know."""
    given = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    passed = {name: value for name, value in given.items() if name not in DEPRECATED}
    return {
        **COLLECTIVES,
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        **passed,
    }


def ranks_held(nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, float]) -> int:
    """How many bundles nodes of these resources hold, a bundle being on one of them."""
    return sum(min(int(node.get(name, 0.0) // n) for name, n in bundle.items()) for node in nodes)


def _by_node(nodes: Sequence[str], here: str) -> list[int]:
    """Bundles so that those of one node are neighbours, the engine's own node first."""
    order = {node: at for at, node in enumerate(dict.fromkeys([here, *nodes]))}
    return sorted(range(len(nodes)), key=lambda index: (order[nodes[index]], index))


def _probe(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # not everywhere but on Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_placed(ray: Any, placement: Any) -> bool:
    """Whether the cluster has given a placement group what it asks for."""
    return bool(ray.util.placement_group_table(placement).get("state") == "CREATED")


def free(ray: Any, like: dict[str, float]) -> dict[str, float]:
    """What nobody has taken in the whole cluster of those resources."""
    available = ray.available_resources()
    return {name: available.get(name, 0.0) for name in like}


def named(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{n:g} {name}" for name, n in resources.items())
