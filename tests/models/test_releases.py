"""`rollout check` on the configs of published checkpoints, whose weights are nowhere here."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rollout import EngineConfig
from rollout.cli.main import main
from rollout.errors import ConfigError
from rollout.server.preflight import Examined, check

RELEASES = Path(__file__).with_name("releases")  # what their config.json says of the model's shape
# Stated billions of parameters, and ranks. What these hold in common (keys and values of few heads,
# latent projections, norms) is more than an equal share of bfloat16 weights.
SIZES: dict[str, tuple[float, int]] = {
    "gemma-3-27b-it": (27.0, 8),
    "gpt-oss-20b": (20.9, 8),
    "Llama-4-Scout-17B-16E-Instruct": (108.6, 8),
    "Ministral-8B-Instruct-2410": (8.02, 8),
    "Nemotron-H-8B-Base-8K": (8.1, 8),
    "Olmo-3-32B-Think": (32.2, 8),
    "phi-4": (14.7, 2),  # 10 heads of keys and values, which 8 ranks do not divide
}
LARGE: dict[str, tuple[float, int]] = {  # of many experts; the table of a rank takes a second
    "DeepSeek-V3.1": (671.0, 1),
    "DeepSeek-V3.2-Exp": (671.9, 1),  # with the index of each layer
    "GLM-4.6": (357.0, 1),
    "Kimi-K2-Instruct": (1026.0, 1),
    "Kimi-Linear-48B-A3B-Instruct": (49.1, 1),
    "MiniMax-M2": (229.0, 1),
    "Moonlight-16B-A3B": (16.0, 1),
    "Qwen3-30B-A3B": (30.5, 8),
    "Qwen3-Next-80B-A3B-Instruct": (80.0, 1),
}


def examine(where: Path, name: str, **settings: Any) -> Examined:
    """What is known of it before this machine's memory is asked, which may be too small."""
    shutil.copy(RELEASES / f"{name}.json", where / "config.json")
    found: list[Examined] = []
    config = EngineConfig(model=str(where), device="cpu", load_format="dummy", **settings)
    with suppress(ConfigError):
        check(config, found.append)
    return found[0]


def agree(where: Path, name: str, billions: float, ranks: int) -> None:
    found = examine(where, name, tensor_parallel_size=ranks)
    assert found.served == "natively"
    assert found.num_elements == pytest.approx(billions * 1e9, rel=0.02)
    share = found.num_elements * 2 / ranks
    assert share <= max(found.rank_bytes) <= 1.1 * share


@pytest.mark.parametrize("name", SIZES)
def test_a_release_is_served_natively_at_its_stated_size(tmp_path: Path, name: str) -> None:
    agree(tmp_path, name, *SIZES[name])


@pytest.mark.more
@pytest.mark.parametrize("name", LARGE)
def test_a_mixture_is_served_natively_at_its_stated_size(tmp_path: Path, name: str) -> None:
    agree(tmp_path, name, *LARGE[name])


def test_what_a_model_is_is_said_though_this_machine_is_too_small_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(RELEASES / "Ministral-8B-Instruct-2410.json", tmp_path / "config.json")
    monkeypatch.setattr("rollout.server.preflight.available_bytes", lambda device: 1 << 30)
    flags = ["--load-format", "dummy", "--tensor-parallel-size", "8", "--device", "cpu"]
    assert main(["check", str(tmp_path), *flags]) == 2
    said = capsys.readouterr()
    assert "8019.8 M parameters" in said.out
    assert "natively" in said.out
    assert "rank 7: 1912.6 MiB" in said.out
    assert "too little memory for the weights: 15300.6 MiB are needed" in said.err
