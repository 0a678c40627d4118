"""How an autoscaler of a Ray cluster is told, by what it leaves there; no cluster is needed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rollout.engine.executors.ray_autoscaler import _first

NODE = "ffffffff00000"


def _client(**report):
    """Of a cluster whose autoscaler has left ``report``."""
    whole = {"pending_launches": {}, "pending_nodes": [], **report}
    text = json.dumps({"time": 1.0, "autoscaler_report": whole}) if report else None
    return SimpleNamespace(internal_kv_get=lambda key, *_, **__: text.encode() if text else None)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({}, "None"),  # nobody has left any
        # `ray start --head` alone: each node has a type of its own, which nobody could start.
        ({"node_type_mapping": {NODE: f"node_{NODE}"}}, "None"),
        ({"node_type_mapping": {NODE: "head"}}, "its autoscaler starts nodes: none now"),
        (
            {
                "node_type_mapping": {"10.0.0.1": "head", "10.0.0.2": "gpu"},
                "pending_launches": {"gpu": 2, "cpu": 1},
                "pending_nodes": [["10.0.0.2", "gpu", "uninitialized"]],
            },
            "its autoscaler starts nodes: 1 of type 'cpu', 3 of type 'gpu'",
        ),
    ],
)
def test_the_first_one_is_told_from_one_that_only_looks_on(report, said) -> None:
    assert str(_first(_client(**report))) == said
