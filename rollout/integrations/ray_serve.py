"""A fleet as an application of Ray Serve, which is what KubeRay's ``RayService`` keeps running:

    applications:
      - name: rollout
        import_path: rollout.integrations.ray_serve:app
        args:
          fleet: [MODEL, --replicas=2, --host=0.0.0.0, --insecure]

The application's one replica holds ``rollout fleet MODEL ... --ray`` on the cluster that it is on:
a front of its own ports, which clients and trainers reach directly. Serve starts it, asks how it
is, starts it again when it has ended, and answers at its own port where it listens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rollout.distributed.child_environment import hub_tokens
from rollout.errors import ConfigError, WorkerDied
from rollout.fleet.launching.engine_process import ServiceProcess

_LOOK = 2.0  # seconds between Serve's questions


def app(args: Mapping[str, Any]) -> Any:
    """The application of a Serve config. ``args["fleet"]``: what follows ``rollout fleet``, without
    ``--ray``. Tokens come from the environment (``ROLLOUT_TOKEN``), so that no config shows them.
    """
    words = args.get("fleet")
    if set(args) != {"fleet"} or not isinstance(words, list) or not words:
        raise ConfigError(
            "args of rollout.integrations.ray_serve:app are {fleet: [MODEL, FLAG, ...]}: what "
            f"follows `rollout fleet`, as a list; not {dict(args)!r}"
        )
    from ray import serve

    front = serve.deployment(Front).options(num_replicas=1, health_check_period_s=_LOOK)
    return front.bind([str(word) for word in words])


class Front:
    """``rollout fleet WORDS --ray`` as a child of this process."""

    def __init__(self, words: list[str]) -> None:
        import ray

        address = ray.get_runtime_context().gcs_address
        self._process = ServiceProcess(
            "front", ["fleet", *words, "--ray", address], {**_tokens(), **hub_tokens()}
        )
        self._grpc = self._process.ready()

    def check_health(self) -> None:
        status = self._process.ended()
        if status is not None:
            raise WorkerDied(f"the fleet's front has ended with status {status}")

    def __call__(self) -> dict[str, str]:
        return {"http": self._process.http, "grpc": self._grpc}

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self._process.end()


def _tokens() -> dict[str, str]:
    names = ("ROLLOUT_TOKEN", "ROLLOUT_CONTROL_TOKEN")
    return {name: os.environ[name] for name in names if name in os.environ}
