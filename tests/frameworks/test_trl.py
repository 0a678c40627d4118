"""TRL's trainer, as it is installed, trains against ``rollout serve``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from frameworks import jobs
from free_ports import free_port
from serving import serve
from tiny_models import write_tiny
from tiny_vision import write_vision

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "weight_sync.md"
# As the documentation names them.
ROUTES = re.search(r"--open-routes\s+(\S+)`", DOCS.read_text()).group(1).split(",")


@pytest.mark.parametrize(
    "over",
    [("--tensor-parallel-size", "2"), pytest.param(("--replicas", "2"), marks=pytest.mark.more)],
    ids=["ranks", "fleet"],
)
def test_the_stock_grpo_trainer_trains_and_every_sync_arrives(tmp_path: Path, over: Any) -> None:
    write_tiny(tmp_path / "tiny", "qwen3", tokenizer=True)
    # TRL's client sends no token: what it needs, and no more, is opened at an address of its own.
    port = free_port()
    flags = ["--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--token", "secret"]
    flags += ["--open-routes", ",".join(ROUTES), "--open-port", str(port)]
    with serve(tmp_path / "tiny", *flags, *over) as served:
        got = run(
            "trl_job.py", tmp_path / "tiny",
            f"http://127.0.0.1:{port}", served.grpc, "secret", tmp_path / "out",
        )  # fmt: skip
    syncs, rows = got["syncs"], got["rows"]
    assert [sync["equal"] for sync in syncs] == [True] * 3
    assert [sync["version"] for sync in syncs] == [1, 2, 3]
    assert len({sync["norm"] for sync in syncs}) == 3  # every step changed the weights
    assert len(rows) == 2
    for row in rows:
        # The server's logprobs are those of the distribution it sampled from, as TRL computes them.
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["completions/mean_length"] > 0


@pytest.mark.more
def test_the_stock_grpo_trainer_trains_on_images_tower_and_all(tmp_path: Path) -> None:
    write_vision(tmp_path / "tiny", tokenizer=True)
    port = free_port()
    flags = ["--dtype", "float32", "--logprobs-mode", "raw_logprobs", "--token", "secret"]
    routes = (*ROUTES, "/v1/chat/completions/render", "/inference/v1/generate")
    flags += ["--open-routes", ",".join(routes), "--open-port", str(port)]
    with serve(tmp_path / "tiny", *flags) as served:
        got = run(
            "trl_vision_job.py", tmp_path / "tiny",
            f"http://127.0.0.1:{port}", served.grpc, "secret", tmp_path / "out",
        )  # fmt: skip
    assert [sync["equal"] for sync in got["syncs"]] == [True] * 3
    assert [sync["version"] for sync in got["syncs"]] == [1, 2, 3]
    assert got["images"] > 0
    assert got["moved"] > 0  # the tower learns, and every sync brings it
    for row in got["rows"]:
        # The server saw the very images that TRL scores the samples with.
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
    assert len(got["rows"]) == 2


@pytest.mark.more
def test_trls_client_loses_a_reply_to_every_weight_verb_and_its_finish_commits_no_failure(
    tmp_path: Path,
) -> None:
    write_tiny(tmp_path / "tiny", "qwen3", tied=True)
    with serve(tmp_path / "tiny", "--dtype", "float32") as served:
        got = run("trl_retry_job.py", tmp_path / "tiny", served.http, served.grpc)
    assert (got["lost"], got["left"]) == (5, 0)
    assert (got["version"], got["equal"]) == (1, True)
    assert "409" in got["why"]  # the finish's, which TRL sends from a finally
    assert "model.nonsense.weight" in got["why"]
    assert got["after"] == 1


def run(job: str, *arguments: object) -> Any:
    """With a stand-in of vLLM, which TRL's client imports a few functions of."""
    return jobs.run(job, *arguments, over=HERE / "stand_in")[-1]
