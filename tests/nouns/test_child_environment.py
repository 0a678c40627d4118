"""What the processes of this package are started with."""

from __future__ import annotations

from pathlib import Path

import rollout
from rollout.distributed.child_environment import child_environment


def test_tokens_stay_here_and_everything_else_is_passed_on(monkeypatch) -> None:
    for name in ("ROLLOUT_TOKEN", "ROLLOUT_CONTROL_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, "a-secret")
    for name in ("HF_HOME", "ROLLOUT_KERNELS_TARGET", "TOKENIZERS_PARALLELISM", "WANTED"):
        monkeypatch.setenv(name, "ours")
    env = child_environment({"OURS": "set"}, {"WANTED": "default", "UNHEARD": "default"})
    assert "a-secret" not in env.values()
    for name in ("HF_HOME", "ROLLOUT_KERNELS_TARGET", "TOKENIZERS_PARALLELISM", "WANTED"):
        assert env[name] == "ours"
    assert (env["OURS"], env["UNHEARD"]) == ("set", "default")
    assert str(Path(rollout.__file__).parents[1]) in env["PYTHONPATH"].split(":")
