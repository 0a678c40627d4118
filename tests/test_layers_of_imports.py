"""Who may import whom: the contracts of pyproject.toml, and no circles."""

from __future__ import annotations

import graphlib
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
READ_THE_VERSION = {"rollout.api.embedded", "rollout.cli.client", "rollout.cli.main"}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("rollout", cache_dir=None)


def test_each_level_imports_only_lower_ones() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_nobody_takes_a_public_name_through_the_package_root(graph: grimp.ImportGraph) -> None:
    """``from rollout import X`` resolves through the face, which is above the others."""
    assert graph.find_modules_that_directly_import("rollout") <= READ_THE_VERSION


def test_no_modules_import_each_other_in_a_circle(graph: grimp.ImportGraph) -> None:
    """Not within functions either; a package may look its own modules up when they are needed."""
    imports = {
        name: {
            other
            for other in graph.find_modules_directly_imported_by(name)
            if not other.startswith(f"{name}.")
        }
        for name in graph.modules - {"rollout"}
    }
    graphlib.TopologicalSorter(imports).prepare()


def test_servers_know_no_kind_of_backend(graph: grimp.ImportGraph) -> None:
    """They stand over a ``ServedBackend``, which whoever starts them has made."""
    for kind in (
        "rollout.api.embedded",
        "rollout.fleet.fronts.front",
        "rollout.fleet.fronts.backend",
    ):
        named_by = graph.find_modules_that_directly_import(kind)
        assert named_by  # it is called so still
        assert not [name for name in named_by if name.startswith("rollout.server.")]
