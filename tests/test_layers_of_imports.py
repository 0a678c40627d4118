"""Who may import whom: the levels of docs/architecture.md, read from the source text."""

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rollout"
SYNC = "weight_sync."
NOUNS = {"errors", "config", "generation", "distributed", "metrics", "weights", "wire"}
PROTOCOL = NOUNS | {"kernels", SYNC + "protocol"}
ENGINE = PROTOCOL | {"models", "loader", SYNC + "transports", SYNC + "engine", "engine"}
TRAINER = PROTOCOL | {SYNC + "transports", SYNC + "trainer", SYNC + "versions"}
API = ENGINE | TRAINER | {"rpc", "api"}

# part of the package -> the other parts it may import
MAY_IMPORT = {
    **dict.fromkeys(NOUNS, NOUNS),
    "kernels": NOUNS,
    "models": NOUNS | {"kernels"},
    "loader": NOUNS,
    SYNC + "protocol": NOUNS | {"kernels"},
    "rpc": NOUNS | {SYNC + "protocol"},
    SYNC + "transports": PROTOCOL,
    SYNC + "trainer": PROTOCOL | {SYNC + "transports"},
    SYNC + "versions": TRAINER,
    SYNC + "engine": PROTOCOL | {SYNC + "transports"},
    "testing": TRAINER,
    SYNC + "source": {SYNC + "trainer"},  # public names of what lies deeper
    SYNC + "agreement": {SYNC + "trainer"},
    SYNC + "faults": {"testing"},
    "engine": ENGINE,
    "api": API,
    "server": API | {"server"},
    "cli": API | {"server", "cli"},
    "__main__": {"cli"},
}


def _modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if package else parts), package


MODULES = {name: (path, package) for path, name, package in _modules()}


@cache
def _imports(name, *, at_import_time=False):
    """Modules of this package that ``name`` imports; all, or those it needs while it loads."""
    path, package = MODULES[name]
    found = set()
    for node in _nodes(ast.parse(path.read_text()), at_import_time):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")[: None if package else -1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in MODULES else base)
    return {module for module in found if module == "rollout" or module.startswith("rollout.")}


def _nodes(node, at_import_time):
    for child in ast.iter_child_nodes(node):
        if at_import_time and (
            isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            or (isinstance(child, ast.If) and _runs_elsewhere(child.test))
        ):
            continue
        yield child
        yield from _nodes(child, at_import_time)


def _runs_elsewhere(test):
    """``if TYPE_CHECKING`` and ``if __name__ == "__main__"``."""
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    return bool(names & {"TYPE_CHECKING", "__name__"})


def _part(module):
    """The part a module belongs to: the first component, of weight sync the first two."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["weight_sync"] else 1])


def test_every_part_of_the_package_has_a_level():
    parts = {_part(name) for name in MODULES} - {"", "weight_sync"}
    assert parts <= set(MAY_IMPORT), f"give {parts - set(MAY_IMPORT)} a level"


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_a_part_imports_only_what_its_level_allows(part):
    wrong = [
        f"{name} imports {target}"
        for name in MODULES
        if _part(name) == part
        for target in sorted(_imports(name))
        if _part(target) not in MAY_IMPORT[part] | {part, ""}
    ]
    assert not wrong


def test_the_package_itself_loads_nothing():
    assert _imports("rollout", at_import_time=True) == set()


def test_lower_levels_take_no_public_name_through_the_package_root():
    """``from rollout import X`` resolves through the face, which is above them."""
    wrong = []
    for name, (path, _) in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "rollout":
                wrong += [
                    f"{name}: {alias.name}"
                    for alias in node.names
                    if f"rollout.{alias.name}" not in MODULES
                ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: _imports(name, at_import_time=True) & set(MODULES) for name in MODULES}
    done, path = set(), []

    def visit(name):
        if name in done:
            return
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        path.append(name)
        for target in sorted(graph[name] - {"rollout", name}):
            visit(target)
        done.add(path.pop())

    for name in graph:
        visit(name)


def test_the_face_does_not_import_the_server():
    for name in MODULES:
        if _part(name) == "api":
            assert not [t for t in _imports(name) if _part(t) == "server"]
