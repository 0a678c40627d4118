"""Tinker's SDK, as it is on PyPI, samples from ``rollout serve``."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from clients.install import folder
from frameworks.jobs import run
from serving import serve
from tiny_models import write_tiny

from rollout import Rollout

CLIENT = folder("tinker")
KEY = "tml-secret"
PROMPT = [5, 6, 7, 8]
GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.mark.more
@pytest.mark.skipif(CLIENT is None, reason="tinker is not installed: make clients")
def test_tinkers_own_sdk_samples_and_versions_are_known(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", "qwen3")
    other = dict(write_tiny(tmp_path / "other", "qwen3", seed=1).named_parameters())
    flags = ["--dtype", "float32", "--served-model-name", "tiny", "--token", KEY]
    with (
        serve(tmp_path / "tiny", *flags) as served,
        Rollout.connect(served.grpc, token=KEY) as rollout,
    ):
        rollout.update_weights(other)
        asked = {**GREEDY, "prompt_logprobs": 2, "logprobs": 3}
        ours = rollout.generate(PROMPT, asked)[0]
        url = f"http://{served.http}"
        quiet = {"TINKER_TELEMETRY": "0"}
        got = run("tinker_job.py", url, KEY, "tiny", over=CLIENT, env=quiet)[-1]
        with httpx.Client(base_url=url, headers={"X-API-Key": KEY}) as http:
            query = {"sequence_id": got["sequence_id"]}
            versions = http.get("/api/v1/weight_versions", params=query).json()
            strange = http.get("/api/v1/weight_versions", params={"sequence_id": "x"})
        assert httpx.get(f"{url}/api/v1/get_server_capabilities").status_code == 401
    sample = ours.outputs[0]
    assert got["models"] == ["tiny"]
    assert got["tokens"] == sample.token_ids
    assert got["logprobs"] == pytest.approx(sample.logprobs.raw, abs=1e-5)
    assert got["stop"] == "length"
    scored = [row[token] for row, token in zip(ours.prompt_logprobs[1:], PROMPT[1:], strict=True)]
    assert got["prompt"] == [None, *(pytest.approx(p, abs=1e-5) for p in scored)]
    assert got["last"] == [None, None, None, pytest.approx(scored[-1], abs=1e-5)]
    best = sorted(ours.prompt_logprobs[1].items(), key=lambda item: -item[1])[:2]
    assert [token for token, _ in got["prompt_top"][1]] == [token for token, _ in best]
    assert all(len(row) == 3 for row in got["top"])
    assert len({name for _, name in got["several"]}) == 3
    assert len({tuple(tokens) for tokens, _ in got["several"]}) > 1
    end = sample.token_ids.index(sample.token_ids[2]) + 1
    assert got["stopped"] == [sample.token_ids[:end], "stop"]
    assert "top_p must be" in got["refused"]
    assert versions["versions"] == [1] * 6
    assert versions["epoch"] == ours.epoch
    assert strange.status_code == 404
