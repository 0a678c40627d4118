"""What a Ray cluster's autoscaler makes of a placement group that has no room yet.

Ray has no public call for it: this reads what ``ray status`` shows. Its first autoscaler leaves a
report in the cluster's key-value store, where one that only looks on (``ray start --head`` without
a configuration has one) names each node a type of its own; the second reports a state that names
what it calls infeasible, which is everything where it only looks on. Tried with Ray 2.56.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

_STATUS = b"__autoscaling_status"
_LIMIT = 5.0  # seconds of a question to the cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaler:
    """``infeasible``: it has said that it has no nodes for what was asked; the first one says it
    to nobody but its log. ``coming``: nodes that it starts, by their type.
    """

    infeasible: bool
    coming: Counter[str]

    def __str__(self) -> str:
        if self.infeasible:
            return "its autoscaler calls that infeasible"
        names = ", ".join(f"{n} of type {kind!r}" for kind, n in sorted(self.coming.items()))
        return f"its autoscaler starts nodes: {names or 'none now'}"


def autoscaler(ray: Any, placement: Any = None) -> Autoscaler | None:
    """That of the cluster, and what it says of ``placement``; None where there is none, or Ray no
    longer tells it so.
    """
    try:
        client = ray._private.worker.global_worker.gcs_client
        return _second(client, placement) or _first(client)
    except (AttributeError, ImportError, LookupError, TypeError, ValueError, RuntimeError,
            ray.exceptions.RayError):  # fmt: skip
        return None


def _second(client: Any, placement: Any) -> Autoscaler | None:
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

    reply = GetClusterStatusReply()
    reply.ParseFromString(client.get_cluster_status(timeout_s=_LIMIT))
    state = reply.autoscaling_state
    if not state.autoscaler_state_version:
        return None  # it has never reported
    refused = [group.details for group in state.infeasible_gang_resource_requests]
    name = None if placement is None else placement.id.hex()
    coming = Counter[str]()
    for asked in state.pending_instance_requests:
        coming[asked.ray_node_type_name] += asked.count
    for node in state.pending_instances:
        coming[node.ray_node_type_name] += 1
    return Autoscaler(
        infeasible=name is not None and any(text.startswith(name) for text in refused),
        coming=coming,
    )


def _first(client: Any) -> Autoscaler | None:
    status = client.internal_kv_get(_STATUS, None, timeout=_LIMIT)
    report = json.loads(status).get("autoscaler_report") if status else None
    if not report:
        return None
    types: dict[str, str] = report["node_type_mapping"]
    if all(kind == f"node_{node}" for node, kind in types.items()):
        return None  # it only looks on
    coming = Counter[str](report["pending_launches"])
    coming.update(kind for _, kind, _ in report["pending_nodes"])
    return Autoscaler(infeasible=False, coming=coming)
