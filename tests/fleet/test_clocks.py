"""Leases and deadlines go by clocks that nobody sets."""

import ast
from pathlib import Path

import rollout

ROOT = Path(rollout.__file__).parent
WALL = {"time", "time_ns", "localtime", "gmtime", "now", "today", "utcnow"}
# A node's end is a time of the day, said by its cloud.
MAY = {"fleet/launching/ray_launcher.py"}


def calls_of_the_wall_clock(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(called := node.func, ast.Attribute):
            of = called.value
            if called.attr in WALL and isinstance(of, ast.Name) and of.id in ("time", "datetime"):
                yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_no_code_of_a_fleet_of_its_calls_or_of_an_update_reads_the_time_of_the_day():
    folders = ("fleet", "rpc", "weight_sync", "engine/updates")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    files.append(ROOT / "engine" / "serving_lease.py")
    found = {str(p.relative_to(ROOT)): list(calls_of_the_wall_clock(p)) for p in files}
    assert {name: lines for name, lines in found.items() if lines}.keys() <= MAY
    assert found["fleet/launching/ray_launcher.py"], "the test sees none"
