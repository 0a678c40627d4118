"""What ``import rollout`` offers, and what it does not load."""

import subprocess
import sys

import pytest

import rollout
from rollout import errors

HEAVY = ("rollout.engine", "rollout.server", "rollout.api", "rollout.models", "transformers")


def _modules_after(statement):
    program = f"{statement}\nimport sys\nprint('\\n'.join(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_exported_names_are_sorted_and_all_resolve():
    assert rollout.__all__ == sorted(rollout.__all__)
    for name in rollout.__all__:
        assert getattr(rollout, name).__name__ == name
    assert set(rollout.__all__) <= set(dir(rollout))


def test_every_error_class_is_exported():
    assert {cls.__name__ for cls in errors.STATUS} <= set(rollout.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Rolout'"):
        rollout.Rolout  # noqa: B018


@pytest.mark.parametrize(
    "statement",
    [
        "import rollout",
        "import rollout.weight_sync",
        "import rollout.weight_sync.trainer.publisher",
        "from rollout import SamplingParams, UpdateReceipt, WeightMismatch, WeightSource",
    ],
)
def test_a_trainer_loads_neither_engine_nor_server(statement):
    loaded = _modules_after(statement)
    assert not [name for name in HEAVY if name in loaded]


def test_connecting_face_loads_no_server():
    loaded = _modules_after("from rollout import Rollout")
    assert "rollout.server" not in loaded
    assert "grpc_health.v1" not in loaded
    assert "fastapi" not in loaded
